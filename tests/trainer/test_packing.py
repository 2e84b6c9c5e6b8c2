"""Packing loses no token, keeps documents from seeing each other, and the collator shapes both kinds of batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tigon.data.packing import Collator, Sample, pack, unigram_entropy
from tigon.data.tokenizer import IGNORE_INDEX, Encoded
from tigon.errors import DataError
from tigon.techniques.checkpointing.layer_function import enable

LENGTHS = (3, 9, 1, 20, 8, 2, 7)


def texts():
    """Documents of distinct tokens: document i holds 100 i, 100 i + 1, ..."""
    return [Encoded(list(range(100 * i, 100 * i + n)), list(range(100 * i, 100 * i + n)), f"d{i}", True)
            for i, n in enumerate(LENGTHS, start=1)]  # fmt: skip


def prompts(*sizes, prompt=2):
    return [
        Encoded(list(range(100 * i, 100 * i + n)), [IGNORE_INDEX] * prompt + list(range(100 * i + prompt, 100 * i + n)),
                f"p.jsonl:{i}", False) for i, n in enumerate(sizes, start=1)
    ]  # fmt: skip


def run(documents, **options):
    return pack(documents, 8, **{"packing": True, "cross_document": False, "too_long": "error", **options})


@pytest.mark.parametrize("cross_document", [False, True])
def test_a_packed_stream_holds_every_token_once_in_order(cross_document):
    packed = run(texts(), cross_document=cross_document)
    stream = [token for document in texts() for token in document.tokens]
    assert torch.cat([row.tokens_T for row in packed.samples]).tolist() == stream
    assert [len(row.tokens_T) for row in packed.samples[:-1]] == [8] * (len(packed.samples) - 1)
    assert packed.n_tokens == len(stream)


def test_positions_restart_at_every_document_and_its_first_token_is_never_a_target():
    first = run(texts()).samples[0]  # three tokens of the first document, five of the second
    assert first.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert first.labels_T.tolist() == [IGNORE_INDEX, 101, 102, IGNORE_INDEX, 201, 202, 203, 204]


def test_with_attention_across_documents_positions_run_through_the_row():
    first = run(texts(), cross_document=True).samples[0]
    assert first.positions_T.tolist() == list(range(8))
    assert first.labels_T.tolist() == [IGNORE_INDEX, 101, 102, 200, 201, 202, 203, 204]


def test_prompt_rows_are_never_cut_and_fill_rows_by_best_fit():
    packed = run(prompts(5, 3, 6, 2, 4))
    rows = [row.tokens_T.tolist() for row in packed.samples]
    assert sorted(len(row) for row in rows) == [4, 8, 8]
    for document in prompts(5, 3, 6, 2, 4):
        assert sum(str(document.tokens)[1:-1] in str(row) for row in rows) == (
            1 if len(document.tokens) > 2 else 0
        ) or (len(document.tokens) == 2 and any(document.tokens[0] in row for row in rows))


def test_a_prompt_row_keeps_its_mask_inside_a_packed_row():
    (row,) = run(prompts(5, 3)).samples
    assert row.tokens_T.tolist() == [100, 101, 102, 103, 104, 200, 201, 202]
    assert row.labels_T.tolist() == [IGNORE_INDEX] * 2 + [102, 103, 104] + [IGNORE_INDEX] * 2 + [202]
    assert row.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


def test_rows_that_are_too_long_stop_are_cut_or_are_dropped_and_counted():
    documents = prompts(5, 12, 11) + prompts(30, prompt=10)
    with pytest.raises(DataError, match=r"p\.jsonl:2: 12 tokens, over data\.sequence_length 8 \(3 documents are\)"):
        run(documents)
    cut = run(documents, too_long="truncate")
    assert (cut.n_truncated, cut.n_dropped) == (2, 1), "a row of which only the prompt would be left cannot be cut"
    dropped = run(documents, too_long="drop")
    assert (dropped.n_truncated, dropped.n_dropped) == (0, 3) and dropped.n_tokens == 5


def test_without_packing_each_row_is_one_document_or_one_piece_of_it():
    packed = run(texts() + prompts(5), packing=False)
    # a piece of one token has nothing to predict and is left out
    assert [len(row.tokens_T) for row in packed.samples] == [3, 8, 8, 8, 4, 8, 2, 7, 5]
    batch = Collator(pad_id=0, packing=False)(packed.samples[:2])
    assert batch["attention_mask"].tolist() == [[1] * 3 + [0] * 5, [1] * 8]
    assert batch["labels"][0].tolist() == [IGNORE_INDEX, 101, 102] + [IGNORE_INDEX] * 5


def test_a_short_packed_row_is_filled_with_padding_that_is_a_piece_of_its_own():
    rows = run(texts()).samples
    batch = Collator(pad_id=7, packing=True)([rows[0], rows[-1]])
    n = len(rows[-1].tokens_T)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["input_ids"][1, n:].tolist() == [7] * (8 - n)
    assert batch["labels"][1, n:].tolist() == [IGNORE_INDEX] * (8 - n)
    assert batch["position_ids"][1, n:].tolist() == list(range(8 - n))
    flat = Collator(pad_id=7, packing=True, flatten=True)([rows[0], rows[-1]])
    assert all(torch.equal(flat[name], batch[name].reshape(1, -1)) for name in batch)


def test_rows_that_are_one_document_to_the_model_need_no_positions():
    rows = run(texts(), cross_document=True).samples
    collate = Collator(pad_id=7, packing=True, cross_document=True)
    whole = collate(rows[:2])
    assert set(whole) == {"input_ids", "labels"}
    assert "position_ids" in collate([rows[0], rows[-1]]), "padding is a document of its own"
    with_positions = Collator(pad_id=7, packing=True)(rows[:2])
    model = tiny_llama("sdpa")
    assert torch.equal(model(**whole).loss, model(**with_positions).loss)
    apart = run(texts()).samples
    assert "position_ids" in Collator(pad_id=7, packing=True)(apart[:1])


@pytest.mark.parametrize("cross_document", [False, True])
def test_flattened_batch_has_the_document_bounds_that_transformers_derives_from_positions(cross_document):
    attention = pytest.importorskip("transformers.modeling_flash_attention_utils")
    rows = run(texts() + prompts(5, 3), cross_document=cross_document).samples
    batch = Collator(pad_id=7, packing=True, flatten=True)([rows[0], rows[1], rows[-1]])
    (bounds_q, bounds_k), (longest_q, longest_k) = attention.prepare_fa_kwargs_from_position_ids(batch["position_ids"])
    assert torch.equal(batch["cu_seq_lens_q"], bounds_q) and batch["cu_seq_lens_q"].dtype == torch.int32
    assert torch.equal(batch["cu_seq_lens_k"], bounds_k)
    assert (batch["max_length_q"], batch["max_length_k"]) == (int(longest_q), int(longest_k))


def attend_by_bounds(module, query, key, value, attention_mask, *, cu_seq_lens_q, max_length_q, scaling, **_):
    """A flash kernel's attention, for the CPU: it knows the documents by the bounds only."""
    bounds = cu_seq_lens_q.tolist()
    assert max(stop - start for start, stop in itertools.pairwise(bounds)) == max_length_q
    outputs = []
    for start, stop in itertools.pairwise(bounds):
        part = [tensor[:, :, start:stop] for tensor in (query, key, value)]
        outputs.append(torch.nn.functional.scaled_dot_product_attention(
            *part, is_causal=True, scale=scaling, enable_gqa=True
        ))  # fmt: skip
    return torch.cat(outputs, 2).transpose(1, 2), None


@pytest.mark.parametrize("checkpointed", [False, True])
def test_flattened_batch_trains_like_the_packed_one(checkpointed):
    """Every layer receives the document bounds, also when it is recomputed."""
    modeling = pytest.importorskip("transformers.modeling_utils")
    rows = run(texts() + prompts(5, 3)).samples
    rows = [rows[0], rows[-2], rows[-1]]
    modeling.ALL_ATTENTION_FUNCTIONS.register("attend_by_bounds", attend_by_bounds)
    gradients = []
    for flatten in (False, True):
        model = tiny_llama("sdpa").train()
        if flatten:
            model.config._attn_implementation = "attend_by_bounds"
        if checkpointed:
            enable(model)
        model(**Collator(pad_id=7, packing=True, flatten=flatten)(rows)).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def tiny_llama(attention):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_documents_of_a_packed_row_do_not_see_each_other(attention):
    """The logits of a document do not depend on the other documents in its row."""
    model = tiny_llama(attention)
    first, second = prompts(5, 3)
    (row,) = run([first, second]).samples
    with torch.no_grad():
        batch = Collator(pad_id=0, packing=True)([row])
        packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        alone = model(input_ids=torch.tensor([second.tokens])).logits
        crossing = model(input_ids=batch["input_ids"]).logits
    torch.testing.assert_close(packed[:, 5:], alone)
    assert not torch.allclose(crossing[:, 5:], alone, atol=1e-4), "the test could not fail"


def test_the_packed_loss_is_the_mean_over_the_learned_tokens_of_the_documents_alone():
    model = tiny_llama("sdpa")
    documents = prompts(5, 3)
    (row,) = run(documents).samples
    total, n_learned = 0.0, 0
    with torch.no_grad():
        loss = model(**Collator(pad_id=0, packing=True)([row])).loss
        for document in documents:
            logits = model(input_ids=torch.tensor([document.tokens])).logits[0, :-1].double()
            labels = torch.tensor(document.labels[1:])
            total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
            n_learned += int((labels != IGNORE_INDEX).sum())
    assert float(loss) == pytest.approx(total / n_learned, rel=1e-5)


def test_unigram_entropy_matches_a_hand_computed_sequence():
    labels = torch.tensor([IGNORE_INDEX, 5, 5, 5, 6], dtype=torch.int32)
    row = Sample(labels.clamp(min=0), labels, torch.arange(5))
    assert unigram_entropy([row]) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
