"""Text while tokens arrive: whole characters only, and together the full decode."""

from __future__ import annotations

import itertools

import pytest
from decoding_fakes import Oracle
from fakes import byte_tokenizer, tiny_target
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.decoding.baseline import PlainDecoder
from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.streaming import Detokenizer, StreamChunk, TextStream

BYTES = byte_tokenizer()
TEXT = "héllo 🙂🙂 漢字 — ok\nfin 👩‍🚀"


def pieces(ids: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    stream = TextStream(BYTES.decode, stops)
    out = []
    for token in ids:
        if stream.push(token):
            break
        out.append(stream.take())
    return [*out, stream.finish()], stream.stopped


def test_one_byte_at_a_time_gives_whole_characters():
    ids = BYTES.encode(TEXT, add_special_tokens=False)
    assert len(ids) == len(TEXT.encode())
    got, _ = pieces(ids)
    assert "".join(got) == TEXT == BYTES.decode(ids)
    assert not any("\ufffd" in piece for piece in got)


@given(st.lists(st.integers(3, 258), max_size=30))
@settings(max_examples=200, deadline=None)
def test_any_bytes_add_up_to_the_full_decode(ids: list[int]):
    """Broken characters too: they come as the full decode shows them."""
    got, _ = pieces(ids)
    assert "".join(got) == BYTES.decode(ids)


@given(st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
@settings(max_examples=200, deadline=None)
def test_stop_strings_one_letter_at_a_time(text: str, stops: list[str]):
    ids = BYTES.encode(text, add_special_tokens=False)
    got, stopped = pieces(ids, tuple(stops))
    ends = [end for end in range(len(text) + 1) if any(stop in text[:end] for stop in stops)]
    assert stopped == bool(ends)
    if ends:  # the first letter that completes a stop; the text before the earliest match
        seen = text[: ends[0]]
        assert "".join(got) == seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    else:
        assert "".join(got) == text


def test_held_text_is_given_out_once_it_is_no_stop():
    stream = TextStream(BYTES.decode, ("abc",))
    taken = []
    for token in BYTES.encode("xabd", add_special_tokens=False):
        stream.push(token)
        taken.append(stream.take())
    assert taken == ["x", "", "", "abd"]


def test_a_tokenizer_that_looks_back():
    """Words joined by spaces: the first piece has none, so no piece may be decoded by itself."""
    stream = Detokenizer(lambda ids: " ".join(f"w{token}" for token in ids))
    assert [stream.push(token) for token in (1, 2, 3)] == ["w1", " w2", " w3"]
    assert stream.flush() == ""


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_runs_over_multi_byte_text(depth: int):
    """A target that says TEXT: runs of every length end inside characters."""
    target = tiny_target(seed=7, bytes_tokenizer=True)
    ids = PlainDecoder(target).generate([[70, 71]], max_new_tokens=60, eos_ids=()).tokens[0]
    order = list(dict.fromkeys(ids))  # rename the target's words so that they spell TEXT
    letters = BYTES.encode(TEXT, add_special_tokens=False)
    names = dict(zip(order, itertools.cycle(letters), strict=False))

    class Renamed:
        def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
            return BYTES.decode([names.get(token, 100) for token in tokens])

    target.tokenizer = Renamed()
    for decoder in (SpeculativeDecoder(target, lambda: Oracle([[70, 71, *ids]], depth)), PlainDecoder(target)):
        chunks: list[StreamChunk] = list(decoder.stream([70, 71], max_new_tokens=60, eos_ids=()))
        assert "".join(chunk.text for chunk in chunks) == Renamed().decode(ids)
        assert [token for chunk in chunks for token in chunk.tokens] == ids
        assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        whole = Renamed().decode(ids)
        if "\ufffd" not in whole:
            assert not any("\ufffd" in chunk.text for chunk in chunks)
        # a step emits its accepted drafts and one token more (the first chunk is the prefill's token)
        assert all(chunk.accepted == len(chunk.tokens) - 1 for chunk in chunks)


def test_special_tokens_are_ids_but_no_text():
    target = tiny_target(seed=7, bytes_tokenizer=True)
    ids = PlainDecoder(target).generate([[70]], max_new_tokens=12, eos_ids=()).tokens[0]
    place = next(index for index in range(3, 12) if ids[index] not in ids[:index])

    class EndsThere:
        def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
            kept = [token for token in tokens if not (skip_special_tokens and token == ids[place])]
            return "".join(f"<{token}>" for token in kept)

    target.tokenizer = EndsThere()
    chunks = list(PlainDecoder(target).stream([70], max_new_tokens=12, eos_ids=(ids[place],)))
    assert [token for chunk in chunks for token in chunk.tokens] == ids[: place + 1]
    assert "".join(chunk.text for chunk in chunks) == "".join(f"<{token}>" for token in ids[:place])
    assert chunks[-1].finish == "stop"
