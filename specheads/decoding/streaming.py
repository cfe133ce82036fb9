"""Text while tokens arrive: never half a character, never a piece of a stop string, and in the end the full decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[list[int]], str]
REPLACEMENT = "\ufffd"  # what a decoder prints for bytes that are not (yet) a character


@dataclass(frozen=True)
class StreamChunk:
    """What one step added. ``finish`` is set on the last chunk: "stop", "stop_string" or "length"."""

    tokens: list[int]
    text: str
    accepted: int  # drafts that the target accepted in this step
    finish: str | None = None


class Detokenizer:
    """Incremental decoding through ``decode(ids)`` alone.

    Only a short window is decoded each time: from the last place where the text was known to end at a whole
    character. Joined pieces equal ``decode(all ids)``.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._emitted: list[str] = []
        self._start = 0  # where the window starts: one piece before the read ids, for tokenizers that look back
        self._read = 0  # ids whose text was given out

    def push(self, token: int) -> str:
        """The text that became certain by ``token``; empty while a character is incomplete."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return ""
        self._start, self._read = self._read, len(self._ids)
        self._emitted.append(after[len(before) :])
        return self._emitted[-1]

    def flush(self) -> str:
        """The rest, broken characters included, as the full decode shows it."""
        whole, emitted = self._decode(self._ids), "".join(self._emitted)
        if whole.startswith(emitted):
            rest = whole[len(emitted) :]
        else:  # a tokenizer that rewrites earlier text: what the window still holds is the best there is
            known = self._decode(self._ids[self._start : self._read])
            rest = self._decode(self._ids[self._start :])[len(known) :]
        self._emitted.append(rest)
        return rest


class TextStream:
    """Detokenised text of one row, cut at the first stop string.

    Text that may be the beginning of a stop string is held back until it is known not to be. ``push`` looks at every
    token by itself, so the token that completes a match is found wherever it lies in a run of accepted drafts.
    """

    def __init__(self, decode: Decode, stop_strings: Sequence[str] = ()) -> None:
        self._pieces = Detokenizer(decode)
        self._stops = tuple(stop_strings)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""  # decoded, not given out
        self._ready = ""  # given out at the next take()
        self.stopped = False

    def push(self, token: int) -> bool:
        """Add one token; True if it completes a stop string."""
        self._held += self._pieces.push(token)
        self._release()
        return self.stopped

    def take(self) -> str:
        """New text that is certain."""
        ready, self._ready = self._ready, ""
        return ready

    def finish(self) -> str:
        """All that is left; nothing behind a stop string."""
        if not self.stopped:
            self._held += self._pieces.flush()
            self._release()
        rest = self._ready + ("" if self.stopped else self._held)
        self._ready = self._held = ""
        return rest

    def _release(self) -> None:
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.stopped = True
            self._ready, self._held = self._ready + self._held[: min(places)], ""
            return
        keep = 0  # the longest end of the text that some stop string begins with
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                keep = length
                break
        cut = len(self._held) - keep
        self._ready, self._held = self._ready + self._held[:cut], self._held[cut:]
