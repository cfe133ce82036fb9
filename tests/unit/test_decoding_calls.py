"""Calls share only weights: nothing is left behind by a call, not even by one that is broken off."""

from __future__ import annotations

import pytest
import torch
from decoding_fakes import prompts_of
from fakes import tiny_target

from specheads.decoding.controller import StepCosts
from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.drafters.joined import JoinedDrafter
from specheads.decoding.drafters.ngram import NgramDrafter
from specheads.target.adapter import Target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(seed=3)


def test_a_b_a_equals_fresh_calls_and_an_abort_leaves_no_trace(target: Target):
    prompts = prompts_of(2, seed=21)
    costs = StepCosts({1: 5.0, 8: 6.0})

    def decoder() -> SpeculativeDecoder:
        return SpeculativeDecoder(
            target, lambda: JoinedDrafter(NgramDrafter(), NgramDrafter(max_match=2, drafts=3), costs)
        )

    fresh = [decoder().generate([prompt], max_new_tokens=25, eos_ids=()).tokens for prompt in prompts]
    one = decoder()
    assert one.generate(prompts[:1], max_new_tokens=25, eos_ids=()).tokens == fresh[0]
    assert one.generate(prompts[1:], max_new_tokens=25, eos_ids=()).tokens == fresh[1]
    assert one.generate(prompts[:1], max_new_tokens=25, eos_ids=()).tokens == fresh[0]
    left = one.stream(prompts[1], max_new_tokens=25, eos_ids=())
    next(left), next(left)
    assert not torch.is_inference_mode_enabled()
    left.close()

    class Boom(NgramDrafter):
        def propose(self, root):
            raise RuntimeError("in the middle")

    broken = SpeculativeDecoder(target, Boom)
    with pytest.raises(RuntimeError, match="in the middle"):
        broken.generate(prompts[:1], max_new_tokens=25, eos_ids=())
    assert one.generate(prompts[1:], max_new_tokens=25, eos_ids=()).tokens == fresh[1]


def test_two_streams_side_by_side(target: Target):
    prompts = prompts_of(2, seed=22)
    decoder = SpeculativeDecoder(target, NgramDrafter)
    alone = [decoder.generate([prompt], max_new_tokens=20, eos_ids=()).tokens[0] for prompt in prompts]
    streams = [decoder.stream(prompt, max_new_tokens=20, eos_ids=()) for prompt in prompts]
    got: list[list[int]] = [[], []]
    for _ in range(20):
        for row, stream in enumerate(streams):
            chunk = next(stream, None)
            got[row] += chunk.tokens if chunk else []
    assert got == alone
