"""Q4_K and Q6_K: gguf reads the packed numbers, and the codes are near to the weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trained_models import make_byte_level, make_family

from tigon.trained import gguf_k_quants

gguf = pytest.importorskip("gguf")
TYPES = gguf.GGMLQuantizationType


def read(packed: np.ndarray, name: str) -> np.ndarray:
    return gguf.dequantize(packed, TYPES[name])


def error(values: np.ndarray, name: str) -> float:
    quantiser = gguf_k_quants.quantize if name in gguf_k_quants.QUANTISERS else gguf.quantize
    packed = quantiser(values, name if name in gguf_k_quants.QUANTISERS else TYPES[name])
    return float(np.linalg.norm(read(packed, name) - values) / np.linalg.norm(values))


def test_packed_q4_k_is_what_gguf_reads() -> None:
    rng = np.random.default_rng(0)
    d, d_offset = (rng.random((5, 1)).astype(np.float16).astype(np.float32) for _ in range(2))
    scales, offsets = (rng.integers(0, 64, (5, 8)).astype(np.float32) for _ in range(2))
    codes = rng.integers(0, 16, (5, 8, 32)).astype(np.float32)
    packed = gguf_k_quants.pack_q4_k(d, d_offset, scales, offsets, codes)
    expected = (d * scales)[..., None] * codes - (d_offset * offsets)[..., None]
    np.testing.assert_array_equal(read(packed, "Q4_K"), expected.reshape(5, 256))


def test_packed_q6_k_is_what_gguf_reads() -> None:
    rng = np.random.default_rng(0)
    d = rng.standard_normal((5, 1)).astype(np.float16).astype(np.float32)
    scales = rng.integers(-128, 128, (5, 16)).astype(np.float32)
    codes = rng.integers(-32, 32, (5, 16, 16)).astype(np.float32)
    packed = gguf_k_quants.pack_q6_k(d, scales, codes)
    np.testing.assert_array_equal(read(packed, "Q6_K"), ((d * scales)[..., None] * codes).reshape(5, 256))


@pytest.mark.parametrize("shift", [0.0, 3.0, -3.0], ids=["centred", "positive", "negative"])
def test_rounding_loses_less_than_ggufs_own_types_of_as_many_bits(shift: float) -> None:
    values = (np.random.default_rng(0).standard_normal((64, 512)) * 0.02 + shift * 0.02).astype(np.float32)
    assert error(values, "Q4_K") < 0.9 * error(values, "Q4_0")  # 4.5 bits per weight both
    assert error(values, "Q8_0") < error(values, "Q6_K") < error(values, "Q5_0")


def test_a_block_is_rounded_within_a_step_and_a_fifth_of_its_range() -> None:
    values = np.random.default_rng(0).uniform(-1, 1, (8, 256)).astype(np.float32)
    blocks, found = values.reshape(-1, 32), read(gguf_k_quants.quantize(values, "Q4_K"), "Q4_K").reshape(-1, 32)
    step = (blocks.max(-1) - blocks.min(-1)) / 15
    # The shared factors round scale and offset of a block to 6 bits.
    assert (np.abs(found - blocks).max(-1) < step * 1.2).all()


@pytest.mark.parametrize("name", gguf_k_quants.QUANTISERS)
@pytest.mark.parametrize("value", [0.0, 0.25, -0.25])
def test_a_constant_stays_nearly_constant(name: str, value: float) -> None:
    values = np.full((2, 256), value, np.float32)
    np.testing.assert_allclose(read(gguf_k_quants.quantize(values, name), name), values, rtol=1e-3)


def test_rows_keep_their_order_beyond_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).standard_normal((7, 512)).astype(np.float32)
    whole = gguf_k_quants.quantize(values, "Q6_K")
    monkeypatch.setattr(gguf_k_quants, "_CHUNK", 3)
    np.testing.assert_array_equal(gguf_k_quants.quantize(values, "Q6_K"), whole)


@pytest.mark.parametrize("tied", [False, True])
def test_q4_k_m_has_the_types_of_llama_cpp(tigon, tmp_path, tied: bool) -> None:
    model = make_family("llama", hidden_size=256, intermediate_size=96, num_hidden_layers=9, tie_word_embeddings=tied)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "source")
    make_byte_level().save_pretrained(tmp_path / "source")
    done = tigon("export", tmp_path / "source", tmp_path / "out", "--gguf", "q4_k_m")
    assert done.code == 0, done.err
    assert "9 matrices are Q5_0 or Q8_0, because their rows are no multiple of 256" in done.out
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out" / "out-q4_k_m.gguf").tensors}
    more = [0, 3, 6, 7, 8]  # the first eighth, each third layer, the last eighth
    assert {i for i in range(9) if types[f"blk.{i}.attn_v.weight"] == "Q6_K"} == set(more)
    assert [types[f"blk.{i}.ffn_down.weight"] for i in range(9)] == ["Q8_0" if i in more else "Q5_0" for i in range(9)]
    assert {types[f"blk.{i}.ffn_up.weight"] for i in range(9)} == {"Q4_K"}
    assert types["token_embd.weight"] == ("Q6_K" if tied else "Q4_K")
    assert types.get("output.weight") == (None if tied else "Q6_K")
