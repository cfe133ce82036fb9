"""Where an answer ends: EOS inside a run, exact lengths, the context limit, stop strings; and refused requests."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from decoding_fakes import Liar, Oracle, RandomTrees, greedy_by_hand, prompts_of
from fakes import tiny_target

from specheads.decoding.baseline import PlainDecoder
from specheads.decoding.controller import StepCosts
from specheads.decoding.decoder import Decoder, SpeculativeDecoder
from specheads.decoding.drafters.joined import JoinedDrafter
from specheads.decoding.drafters.ngram import NgramDrafter
from specheads.target.adapter import Target
from specheads.types import SamplingParams
from specheads.utils import InputError

PROMPT = [10, 11, 12]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(seed=3)


@pytest.fixture(scope="module")
def words(target: Target) -> list[int]:
    """40 greedy words after PROMPT."""
    return target.generate([PROMPT], max_new_tokens=40, eos_ids=()).tokens[0]


def oracle(target: Target, words: list[int], depth: int = 8) -> SpeculativeDecoder:
    return SpeculativeDecoder(target, lambda: Oracle([PROMPT + words], depth))


def first_new(words: list[int], place: int) -> int:
    """The first place at or after ``place`` whose token did not occur before it."""
    return next(index for index in range(place, len(words)) if words[index] not in words[:index])


@pytest.mark.parametrize("offset", range(9))
def test_eos_anywhere_in_an_accepted_run(offset: int, target: Target, words: list[int]):
    place = first_new(words, 1 + offset)
    eos = (words[place],)
    for decoder in (oracle(target, words), PlainDecoder(target), SpeculativeDecoder(target, NgramDrafter)):
        out = decoder.generate([PROMPT], max_new_tokens=40, eos_ids=eos)
        assert out.tokens == [words[: place + 1]]
        assert out.finish == ["stop"]
        assert out.stats.emitted == [place]


def test_eos_as_the_very_first_token(target: Target, words: list[int]):
    out = oracle(target, words).generate([PROMPT], max_new_tokens=40, eos_ids=(words[0],))
    assert (out.tokens, out.finish) == ([words[:1]], ["stop"])
    assert out.stats.target_forwards == [0]


def test_several_eos_ids_and_those_of_the_target(target: Target, words: list[int]):
    early, late = first_new(words, 3), first_new(words, 12)
    out = oracle(target, words).generate([PROMPT], max_new_tokens=40, eos_ids=(words[late], words[early], 63))
    assert out.tokens == [words[: early + 1]]
    other = tiny_target(seed=3)
    other.config = dataclasses.replace(other.config, eos_ids=(words[late], words[early]))
    assert oracle(other, words).generate([PROMPT], max_new_tokens=40).tokens == [words[: early + 1]]
    assert len(oracle(other, words).generate([PROMPT], max_new_tokens=40, eos_ids=()).tokens[0]) == 40


def test_a_drafted_eos_that_is_refused_ends_nothing(target: Target, words: list[int]):
    eos = next(token for token in range(64) if token not in words)
    decoder = SpeculativeDecoder(target, lambda: Liar([PROMPT + words], 4, 64, eos=eos))
    assert decoder.generate([PROMPT], max_new_tokens=30, eos_ids=(eos,)).tokens == [words[:30]]


def test_rows_end_one_by_one(target: Target):
    prompts = prompts_of(5, seed=4)
    plain = [target.generate([prompt], max_new_tokens=30, eos_ids=()).tokens[0] for prompt in prompts]
    eos = (plain[0][first_new(plain[0], 4)], plain[3][first_new(plain[3], 9)])
    expected = [greedy_by_hand(target, prompt, 30, eos) for prompt in prompts]
    assert len({len(row) for row in expected}) > 2
    answers = [prompt + row for prompt, row in zip(prompts, plain, strict=True)]
    costs = StepCosts({1: 5.0, 8: 6.0, 32: 8.0})
    for make in (
        lambda: Oracle(answers, 6, layer_ids=(2,)),
        lambda: RandomTrees(answers, 10, 64),
        NgramDrafter,
        lambda: JoinedDrafter(NgramDrafter(), RandomTrees(answers, 10, 64), costs),
    ):
        out = SpeculativeDecoder(target, make).generate(prompts, max_new_tokens=30, eos_ids=eos)
        assert out.tokens == expected
        assert out.finish == ["stop" if row[-1] in eos else "length" for row in expected]
    assert PlainDecoder(target).generate(prompts, max_new_tokens=30, eos_ids=eos).tokens == expected


@pytest.mark.parametrize("limit", range(1, 10))
def test_exactly_max_new_tokens(limit: int, target: Target, words: list[int]):
    for decoder in (oracle(target, words, 5), PlainDecoder(target)):
        out = decoder.generate([PROMPT], max_new_tokens=limit, eos_ids=())
        assert out.tokens == [words[:limit]]
        assert out.finish == ["length"]


@pytest.mark.parametrize("length", [1, 20, 28, 30, 31])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_context_limit(kind: str, length: int):
    """Context 32: prompt and answer fill it to the last position; no node is ever fed at a position beyond it."""
    small = tiny_target(kind, seed=3, max_position_embeddings=32, n_positions=32)
    assert small.config.context_limit == 32
    prompt = prompts_of(1, longest=1, seed=length)[0] * length
    expected = greedy_by_hand(small, prompt, 32 - length)
    seen: list[int] = []
    forward = small.forward

    def watched(tokens, *, positions=None, **rest):
        if positions is not None:
            seen.append(int(positions.max()))
        return forward(tokens, positions=positions, **rest)

    small.forward = watched  # type: ignore[method-assign]
    answers = [prompt + expected + [0] * 10]
    for decoder in (
        SpeculativeDecoder(small, lambda: Oracle(answers, 6)),
        SpeculativeDecoder(small, lambda: RandomTrees(answers, 30, 64)),
        SpeculativeDecoder(small, lambda: NgramDrafter(drafts=20)),
        PlainDecoder(small),
    ):
        out = decoder.generate([prompt], max_new_tokens=100, eos_ids=())
        assert out.tokens == [expected]
        assert out.finish == ["length"]
        both = decoder.generate([prompt], max_new_tokens=1, eos_ids=())
        assert both.tokens == [expected[:1]]
    assert max(seen, default=0) < 32


def test_rows_at_the_limit_beside_rows_that_are_not():
    small = tiny_target(seed=3, max_position_embeddings=32)
    prompts = [[9] * 29, [8] * 3, [7] * 31]
    expected = [greedy_by_hand(small, prompt, min(20, 32 - len(prompt))) for prompt in prompts]
    answers = [prompt + words + [0] * 9 for prompt, words in zip(prompts, expected, strict=True)]
    out = SpeculativeDecoder(small, lambda: RandomTrees(answers, 20, 64)).generate(
        prompts, max_new_tokens=20, eos_ids=()
    )
    assert out.tokens == expected


def test_one_token_prompt(target: Target):
    expected = greedy_by_hand(target, [1], 12)
    for make in (NgramDrafter, lambda: Oracle([[1, *expected]], 3, layer_ids=(0, 3))):
        assert SpeculativeDecoder(target, make).generate([[1]], max_new_tokens=12, eos_ids=()).tokens == [expected]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "prompts: got none"),
        ({"prompts": [[]]}, "prompt 0: got 0 tokens"),
        ({"prompts": [[5], [1] * 256]}, "prompt 1: got 256 tokens, expected 1 to 255"),
        ({"prompts": [[64]]}, "prompt 0: got token ids from 64 to 64, expected 0 to 63"),
        ({"prompts": [[3, -1]]}, "prompt 0: got token ids from -1"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"max_new_tokens": -5}, "max_new_tokens: got -5"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: got 1.5"),
        ({"stop_strings": "abc"}, "stop_strings: got 'abc'"),
        ({"stop_strings": [""]}, "stop_strings"),
        ({"sampling": SamplingParams(-1.0)}, "temperature: got -1.0"),
        ({"sampling": SamplingParams(1.0, top_p=0.0)}, "top_p: got 0.0"),
    ],
)
def test_requests_that_are_refused(change: dict, message: str, target: Target):
    request = {"prompts": [PROMPT], "max_new_tokens": 4, **change}
    for decoder in (SpeculativeDecoder(target, NgramDrafter), PlainDecoder(target)):
        with pytest.raises(InputError, match=message.replace("[", r"\[")):
            decoder.generate(**request)
        if len(request["prompts"]) == 1:
            arguments = {**request, "prompt": request["prompts"][0]}
            del arguments["prompts"]
            with pytest.raises(InputError):  # at the call, not at the first chunk
                decoder.stream(**arguments)


def test_a_tree_larger_than_declared_is_an_error(target: Target, words: list[int]):
    drafter = Oracle([PROMPT + words], 5)
    drafter.max_nodes = 3
    with pytest.raises(ValueError, match="max_nodes=3"):
        SpeculativeDecoder(target, lambda: drafter).generate([PROMPT], max_new_tokens=10, eos_ids=())


# --- text ends ---


@pytest.fixture(scope="module")
def letters() -> Target:
    return tiny_target(seed=7, bytes_tokenizer=True)


class Reader:
    """A tokenizer whose token i reads as ``names[i]``; nothing but ``decode``."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names = names

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.names.get(token, "_") for token in ids)


def with_names(words: list[int], names: list[str]) -> Target:
    """A target whose greedy words after PROMPT read as ``names`` (for words that are all different)."""
    other = tiny_target(seed=3)
    other.tokenizer = Reader(dict(zip(words, names, strict=False)))
    return other


def distinct_words(words: list[int]) -> int:
    """How many words from the start are all different."""
    return next(count for count in range(len(words), 0, -1) if len(set(words[:count])) == count)


@pytest.mark.parametrize(
    ("names", "stops", "kept", "text"),
    [
        (["x", "ab", "c", "d"], ["b"], 2, "xa"),  # a stop inside a token: ids end with it, text before it
        (["x", "...", "c", "d"], [".."], 2, "x"),
        (["x", "a", "bc", "d"], ["ab"], 3, "x"),  # split over two tokens
        (["x", "a", "b", "cd"], ["zzz", "abc"], 4, "x"),  # over three; the second of two
        (["x", "a", "b", "c"], ["bc", "ab"], 3, "x"),  # whichever is complete first
        (["x", "a", "a", "b"], ["aab"], 4, "x"),
        (["stop", "a", "b", "c"], ["stop"], 1, ""),  # in the prefill's token
    ],
)
def test_stop_strings(names: list[str], stops: list[str], kept: int, text: str, words: list[int]):
    assert distinct_words(words) >= 4
    target = with_names(words, names)
    for depth in (1, 2, 8):
        decoders: list[Decoder] = [oracle(target, words, depth), PlainDecoder(target)]
        for decoder in decoders:
            out = decoder.generate([PROMPT], max_new_tokens=20, eos_ids=(), stop_strings=stops)
            assert (out.tokens, out.finish) == ([words[:kept]], ["stop_string"])
            chunks = list(decoder.stream(PROMPT, max_new_tokens=20, eos_ids=(), stop_strings=stops))
            assert "".join(chunk.text for chunk in chunks) == text
            assert [token for chunk in chunks for token in chunk.tokens] == words[:kept]
            assert chunks[-1].finish == "stop_string"


@pytest.mark.parametrize("place", range(4))
def test_stop_strings_over_bytes(place: int, letters: Target):
    """Broken characters around the stop; the same end as one token at a time, and the text that a search finds."""
    ids = PlainDecoder(letters).generate([PROMPT], max_new_tokens=60, eos_ids=()).tokens[0]
    text = letters.tokenizer.decode(ids, skip_special_tokens=True)
    whole = [text[begin : begin + 2] for begin in range(len(text) - 1) if "\ufffd" not in text[begin : begin + 2]]
    stop = whole[place * (len(whole) - 1) // 3]
    request = {"max_new_tokens": 60, "eos_ids": (), "stop_strings": [stop]}
    for depth in (1, 7):
        decoder = SpeculativeDecoder(letters, lambda depth=depth: Oracle([PROMPT + ids], depth))
        out = decoder.generate([PROMPT], **request)
        assert out.tokens == PlainDecoder(letters).generate([PROMPT], **request).tokens
        assert out.finish == ["stop_string"]
        assert "".join(chunk.text for chunk in decoder.stream(PROMPT, **request)) == text[: text.find(stop)]


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=1)])
@pytest.mark.parametrize("after", [0, 3])
def test_logits_that_are_no_numbers_stop_the_call(
    target: Target, words: list[int], monkeypatch: pytest.MonkeyPatch, after: int, sampling: SamplingParams
) -> None:
    for decoder in (PlainDecoder(target), oracle(target, words, depth=2)):
        calls, forward = [0], target.forward

        def broken(*args, forward=forward, calls=calls, **options):
            out = forward(*args, **options)
            calls[0] += 1
            if calls[0] > after:
                out.logits = torch.full_like(out.logits, float("nan"))
            return out

        with monkeypatch.context() as patch:
            patch.setattr(target, "forward", broken)
            with pytest.raises(InputError, match="logits are not finite"):
                decoder.generate([PROMPT], max_new_tokens=20, eos_ids=(), sampling=sampling)
