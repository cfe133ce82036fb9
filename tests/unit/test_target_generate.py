"""The stock model's own generate: batches, stops, limits, sampling; the facts that come with a target."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from specheads.target.load import wrap_model
from specheads.types import SamplingParams
from specheads.utils import InputError
from tests.fakes import EOS_ID, stock_target, tiny_model, tiny_target, tiny_tokenizer


def slow_greedy(model: torch.nn.Module, prompt: list[int], new_tokens: int, stops: set[int]) -> list[int]:
    """Whole forwards, one a token."""
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) - len(prompt) < new_tokens and not (len(ids) > len(prompt) and ids[-1] in stops):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_greedy_batch_equals_rows_alone(kind: str) -> None:
    target = tiny_target(kind)
    prompts = [[1, 5, 7], [4, 3, 20, 9, 10], [40]]
    out = target.generate(prompts, max_new_tokens=24)
    assert out.tokens == [slow_greedy(target.model, prompt, 24, {EOS_ID}) for prompt in prompts]
    assert out.finish == ["stop" if ids[-1] == EOS_ID else "length" for ids in out.tokens]
    assert out.stats.emitted == [len(ids) - 1 for ids in out.tokens]


def test_stop_ids_are_kept_as_the_last_id_and_can_be_off_or_several() -> None:
    target = tiny_target()
    free = target.generate([[1, 5, 7]], max_new_tokens=12, eos_ids=()).tokens[0]
    assert len(free) == 12
    stop = free[5]
    first = free.index(stop)
    out = target.generate([[1, 5, 7]], max_new_tokens=12, eos_ids=(63, stop))
    assert out.tokens[0] == free[: first + 1]
    assert out.finish == ["stop"]


def test_the_models_own_sampling_defaults_are_ignored() -> None:
    model = tiny_model()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=3.0, top_k=2, repetition_penalty=5.0, eos_token_id=[9, EOS_ID]
    )
    target = wrap_model(model, tiny_tokenizer(), name="tiny")
    assert target.config.eos_ids == (EOS_ID, 9)
    out = target.generate([[1, 5, 7]], max_new_tokens=20)
    assert out.tokens[0] == slow_greedy(model, [1, 5, 7], 20, {EOS_ID, 9})


def test_sampling_follows_the_seed_and_leaves_the_global_generator_alone() -> None:
    target = tiny_target()
    params = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=3)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first = target.generate([[1, 5, 7]], max_new_tokens=16, sampling=params, eos_ids=()).tokens
    assert torch.equal(state, torch.get_rng_state())
    assert target.generate([[1, 5, 7]], max_new_tokens=16, sampling=params, eos_ids=()).tokens == first
    other = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=4)
    assert target.generate([[1, 5, 7]], max_new_tokens=16, sampling=other, eos_ids=()).tokens != first


def test_sampled_tokens_follow_the_models_distribution() -> None:
    """top_k 0 is off (not transformers' default of 50): every token's share is its probability."""
    target = tiny_target(initializer_range=0.2)
    draws = 3000
    out = target.generate(
        [[1, 5, 7]] * draws, max_new_tokens=1, sampling=SamplingParams(temperature=1.0, seed=0), eos_ids=()
    )
    found = torch.bincount(torch.tensor([ids[0] for ids in out.tokens]), minlength=64).double() / draws
    with torch.no_grad():
        expected = target.model(torch.tensor([[1, 5, 7]])).logits[0, -1].double().softmax(-1)
    assert float((found - expected).abs().sum()) / 2 < 0.08


def test_context_limit_is_exact_for_every_row() -> None:
    target = tiny_target("gpt2", n_positions=16, max_position_embeddings=16)
    assert target.config.context_limit == 16
    out = target.generate([[5] * 12, [6] * 3], max_new_tokens=10, eos_ids=())
    assert [len(ids) for ids in out.tokens] == [4, 10]
    assert out.finish == ["length", "length"]


@pytest.mark.parametrize("prompt", [[], [3] * 256, [3] * 300])
def test_prompts_without_room_are_refused(prompt: list[int]) -> None:
    with pytest.raises(InputError, match="prompt 1"):
        tiny_target().generate([[1, 2], prompt], max_new_tokens=4)


def test_facts_of_the_families() -> None:
    llama3 = tiny_target("llama3").config
    assert llama3.rope_theta == 10_000.0
    assert llama3.rope_scaling is not None
    assert llama3.rope_scaling["rope_type"] == "llama3"
    assert tiny_target("llama").config.rope_scaling is None
    assert tiny_target("qwen3").config.head_dim == 16
    gpt2 = tiny_target("gpt2").config
    assert (gpt2.num_layers, gpt2.num_kv_heads, gpt2.head_dim, gpt2.hidden_size) == (3, 4, 8, 32)
    assert tiny_target("mistral_window").config.context_limit == 24
    assert tiny_target("gemma2").config.context_limit == 24
    assert tiny_target("mistral").config.context_limit == 256


def test_fingerprint_names_the_weights_whatever_dtype_or_path_they_are_loaded_with() -> None:
    exact = tiny_model().to(torch.bfloat16)
    wide = tiny_model().to(torch.bfloat16).float()
    prints = {
        wrap_model(exact, tiny_tokenizer(), name="a").config.fingerprint,
        wrap_model(wide, tiny_tokenizer(), name="b", lean="off").config.fingerprint,
    }
    assert len(prints) == 1
    assert tiny_target(seed=1).config.fingerprint not in prints
    changed = tiny_model(seed=0)
    with torch.no_grad():
        changed.get_decoder().layers[1].mlp.down_proj.weight.mul_(1.5)
    assert wrap_model(changed, tiny_tokenizer(), name="c").config.fingerprint not in prints


def test_target_is_frozen() -> None:
    target = stock_target()
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert "StockTarget" in target.describe()
    assert "fp32" in target.describe()


def test_without_a_seed_every_call_samples_anew() -> None:
    target = tiny_target()
    texts = {tuple(target.generate([[1, 5]], max_new_tokens=12, sampling=SamplingParams(1.0)).tokens[0]) for _ in "ab"}
    assert len(texts) == 2


def test_a_model_keeps_its_own_generation_settings() -> None:
    model = tiny_model()
    model.generation_config = GenerationConfig(eos_token_id=[9, EOS_ID])
    for _ in "ab":  # a second wrap sees what the first one saw
        target = wrap_model(model, tiny_tokenizer(), name="tiny")
        target.generate([[1, 5, 7]], max_new_tokens=2)
        assert target.config.eos_ids == (EOS_ID, 9)
