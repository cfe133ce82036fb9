"""The decoder: prefill, then { propose -> tree mask -> one target forward over N nodes -> verify -> commit }.

Worked alignment for a prompt x0 x1 x2: the prefill commits positions 0..2 and its logits give x3, the first root. A
tree with x4, x5 along one path is checked in one forward at positions 3 + depth; if both are accepted and the target
goes on with x6, then x3 x4 x5 are committed, x6 is the next root, and x4 x5 x6 are emitted. The cache always holds all
tokens but the last.

Legend: B rows, T prompt positions, N tree nodes, P longest accepted path, V vocabulary, F features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.decoding.rows import Rows
from specheads.decoding.stats import Counter
from specheads.decoding.streaming import StreamChunk
from specheads.heads.base import Drafter
from specheads.modules.kv_cache import KVCache
from specheads.sampling import new_generator, pick
from specheads.target.adapter import Target
from specheads.tree.build import cut_depth
from specheads.tree.draft_tree import DraftTree
from specheads.types import GenerationOutput, SamplingParams, Verdict
from specheads.utils import InputError
from specheads.verify import verifier_for

GREEDY = SamplingParams()


def finite_choice(logits: Tensor, chosen: Tensor) -> Tensor:
    """Whether the logit of every chosen token is a finite number (a NaN wins every maximum). B V, B -> B int64."""
    return logits.gather(1, chosen[:, None])[:, 0].isfinite().long()


def refuse_not_a_number(finite: int | bool) -> None:
    """Stop a call whose target gives no numbers; what it emitted before stands.

    Raises:
        InputError: not finite.
    """
    if not finite:
        raise InputError(
            "target: its logits are not finite, expected numbers; its dtype overflows on this text (load it with "
            "target.dtype=fp32) or its weights are damaged"
        )


@dataclass
class Session:
    """The state of one generate call; nothing outlives it."""

    rows: Rows
    count: Counter
    cache: KVCache
    sampling: SamplingParams
    generator: torch.Generator
    drafter: Drafter | None
    accepted: list[int]  # B: drafts accepted in the last step

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The features that the drafter reads."""
        return self.drafter.feature_spec.layer_ids if self.drafter else ()


class Decoder(ABC):
    """What the speculative and the plain decoder share: the request, the prefill, the stream."""

    def __init__(self, target: Target, make_drafter: Callable[[], Drafter] | None = None) -> None:
        self.target = target
        self.make_drafter = make_drafter

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: SamplingParams = GREEDY,
        eos_ids: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
    ) -> GenerationOutput:
        """Answer B prompts of any lengths in one batch.

        ``eos_ids``: None = the target's own, () = never stop at one, else these instead. Stop strings are looked for
        in the answer's text without special tokens. At temperature 0 the tokens are the target's own greedy decoding;
        above, they follow the target's distribution (a seed fixes them for this decoder and batch, it does not give
        the tokens of another decoder).

        Raises:
            InputError: an empty prompt or one that fills the context, max_new_tokens < 1, invalid sampling values.
        """
        rows = self._rows(prompts, max_new_tokens, sampling, eos_ids, stop_strings, with_text=False)
        session = self._open(rows, sampling)
        for _ in self._rounds(session):
            pass
        return GenerationOutput(
            rows.tokens, [str(end) for end in rows.finish], session.count.stats, session.count.seconds
        )

    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: SamplingParams = GREEDY,
        eos_ids: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
    ) -> Iterator[StreamChunk]:
        """One prompt, a chunk after every step. Joined texts are the decoded answer (special tokens left out), cut at
        a stop string; a chunk never ends inside a character. Arguments and errors are those of ``generate``."""
        rows = self._rows([prompt], max_new_tokens, sampling, eos_ids, stop_strings, with_text=True)
        return self._chunks(rows, sampling)

    def _chunks(self, rows: Rows, sampling: SamplingParams) -> Iterator[StreamChunk]:
        session, sent = self._open(rows, sampling), 0
        for _ in self._rounds(session):
            tokens, end = rows.tokens[0], rows.finish[0]
            text = rows.texts[0].take() if end is None else rows.texts[0].finish()
            yield StreamChunk(tokens[sent:], text, session.accepted[0], end)
            sent = len(tokens)

    def _rows(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: SamplingParams,
        eos_ids: Sequence[int] | None,
        stop_strings: Sequence[str],
        with_text: bool,
    ) -> Rows:
        config, tokenizer = self.target.config, self.target.tokenizer
        return Rows(config, tokenizer, prompts, max_new_tokens, sampling, eos_ids, stop_strings, with_text)

    def _open(self, rows: Rows, sampling: SamplingParams) -> Session:
        size, device = len(rows.prompts), self.target.device
        drafter = self.make_drafter() if self.make_drafter else None
        cache = self.target.new_cache(size, rows.longest + (drafter.max_nodes if drafter else 1))
        return Session(rows, Counter(size), cache, sampling, new_generator(sampling, device), drafter, [0] * size)

    def _rounds(self, session: Session) -> Iterator[None]:
        """Pauses after the prefill and after every step."""
        root = self._prefill(session)
        yield
        while session.rows.active():
            session.count.restart()
            root = self._step(session, root)
            yield

    @torch.inference_mode()
    def _prefill(self, session: Session) -> Tensor:
        """Commit the prompts and emit every row's first token, the first root (B)."""
        tokens, lengths = session.rows.padded_prompts(self.target.device)
        out = self.target.forward(tokens, cache=session.cache, layer_ids=session.layer_ids, logits=lengths - 1)
        assert out.logits is not None
        width = tokens.shape[1]
        session.cache.commit(torch.arange(width, device=tokens.device).expand(tokens.shape), lengths, width)
        root = pick(out.logits[:, 0], session.sampling, session.generator)
        refuse_not_a_number(bool(finite_choice(out.logits[:, 0], root).all()))
        for row, token in enumerate(root.tolist()):
            session.rows.take(row, [token])
        if session.drafter and session.rows.active():
            session.drafter.start(tokens, out.features, lengths, session.rows.longest)
        session.count.lap("prefill")
        return root

    @abstractmethod
    def _step(self, session: Session, root: Tensor) -> Tensor:
        """One round after ``root`` (B), every row's last token; returns the next one (B)."""


class SpeculativeDecoder(Decoder):
    """A target with a drafter. ``make_drafter`` is called once for every generate call, so calls share only weights."""

    def __init__(self, target: Target, make_drafter: Callable[[], Drafter]) -> None:
        super().__init__(target, make_drafter)

    @torch.inference_mode()
    def _step(self, session: Session, root: Tensor) -> Tensor:
        """propose -> tree mask -> one target forward -> verify -> commit."""
        cache, count, drafter = session.cache, session.count, session.drafter
        assert drafter is not None
        tree = self._fit(drafter.propose(root), session, drafter.max_nodes)
        count.lap("draft")
        out = self.target.forward(
            tree.tokens,
            positions=cache.lengths[:, None] + tree.depths,
            cache=cache,
            tree_mask=tree.ancestors,
            layer_ids=session.layer_ids,
        )
        assert out.logits is not None
        count.lap("target")
        verdict = verifier_for(session.sampling)(tree, out.logits, session.sampling, session.generator)
        counts, longest = self._emit(session, tree, verdict, out.logits)
        path = verdict.path[:, :longest]  # B P
        cache.commit(path, counts, longest)
        count.lap("verify")
        if session.rows.active():
            features = out.features
            if features is not None:
                features = features.gather(1, path[:, :, None].expand(-1, -1, features.shape[-1]))  # B P F
            drafter.accept(tree.tokens.gather(1, path), features, counts)
            count.lap("draft")
        return verdict.bonus

    def _fit(self, tree: DraftTree, session: Session, largest: int) -> DraftTree:
        """Drop the nodes that could never be emitted: behind ``max_new_tokens`` or the context limit."""
        if tree.size > largest:
            raise ValueError(f"drafter: proposed a tree of {tree.size} nodes, expected at most max_nodes={largest}")
        rooms = [max(session.rows.room(row), 0) for row in range(len(session.rows.prompts))]
        if min(rooms) >= tree.size - 1:
            return tree
        return cut_depth(tree, torch.tensor(rooms, device=tree.tokens.device))

    def _emit(self, session: Session, tree: DraftTree, verdict: Verdict, logits: Tensor) -> tuple[Tensor, int]:
        """Emit the accepted tokens; returns how many nodes each row commits (B) and the largest such number.

        Everything that this needs comes to the host in one read. A row commits as many nodes as it emitted tokens:
        the root and all emitted tokens but the last, so after a cut nothing behind the end is in the cache either.

        Raises:
            InputError: see ``refuse_not_a_number``.
        """
        rows, ends = torch.arange(len(logits), device=logits.device), verdict.counts - 1
        finite = finite_choice(logits[rows, verdict.path[rows, ends]], verdict.bonus)
        facts = torch.stack([finite, verdict.counts, verdict.bonus, tree.depths.amax(1), tree.valid.sum(1)], dim=1)
        emitted = tree.tokens.gather(1, verdict.path)  # B N: root, accepted drafts, then padding
        kept = []
        session.accepted = [0] * len(session.rows.prompts)
        for row, (number, accepted, bonus, depth, nodes, *tokens) in enumerate(torch.cat([facts, emitted], 1).tolist()):
            if session.rows.finish[row] is not None:
                kept.append(0)
                continue
            refuse_not_a_number(number)
            kept.append(session.rows.take(row, [*tokens[1:accepted], bonus]))
            session.accepted[row] = accepted - 1
            session.count.step(row, drafted=depth, accepted=accepted - 1, emitted=kept[-1], nodes=nodes)
        return torch.tensor(kept, device=tree.tokens.device), max(kept)
