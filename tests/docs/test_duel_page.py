"""docs/beside-unsloth.md and the front page show the rows of `benchmarks.duel` that agree, and why others do not."""

from __future__ import annotations

from duel_record import made_up

from benchmarks.pages import duel


def test_summary_compares_at_the_memory_of_unsloths_fastest_row() -> None:
    record = made_up()
    (line,) = duel.summary(record).splitlines()[2:]
    assert line.startswith("| QLoRA of Llama 3.1 8B, 4 x 2,048 tokens | 500 (8.00 GiB) | 600 (7.00 GiB) | 1.20 x |")
    assert line.endswith("| 800 (30.00 GiB) | 900 (40.00 GiB) | 1.12 x |")
    record["measurements"] = [one for one in record["measurements"] if one["entry"] != "tigon-offload"]
    assert len(duel.summary(record).splitlines()) == 2, "without tigon's row there is nothing to compare"


def test_table_shows_rows_that_agree_and_says_why_others_are_missing() -> None:
    record = made_up()
    shown = duel.table(record, "qlora", "4x2048")
    rows = [line for line in shown.splitlines()[2:] if line.startswith("|")]
    assert (
        len(rows) == 7 and rows[0].startswith("| Hugging Face + PEFT | a loop |") and rows[-1].startswith("| tigon |")
    )
    assert '`tigon.plan` with `memory="24GiB"` | 700 | 20.00 | 3.0000, 2.0000 |' in shown
    assert "- `liger` is left out: the loss of step 0 is 9." in shown and "9999" not in shown and "9,999" not in shown
    assert "- `hf-trl` is left out: out of memory." in shown


def test_page_names_the_card_the_versions_and_the_time() -> None:
    record = made_up()
    shown = duel.where(record)
    assert "one Card: torch 9.9" in shown and "tigon 0123456; 2000-01-01" in shown and "5 minutes" in shown


def test_every_entry_has_a_call() -> None:
    assert {(entry.library, entry.setting) for entry in duel.ENTRIES.values()} == duel._CALLS.keys()


def test_front_page_has_a_row_per_task_that_was_measured() -> None:
    record = made_up()
    rows = list(duel.front_rows(record))
    assert rows == [
        ["QLoRA of Llama 3.1 8B, 4 x 2,048 tokens, H100", "300 (19.00 GiB)", "–", "500 (8.00 GiB)", "600 (7.00 GiB)"],
        [
            "QLoRA of Llama 3.1 8B, 4 x 2,048 tokens, most activations kept, H100",
            "",
            "",
            "800 (30.00 GiB)",
            "900 (40.00 GiB)",
        ],
    ]


def test_picture_shows_rows_that_keep_most_only_in_pairs() -> None:
    record = made_up()
    shown = [(label, line["tokens_per_s"]) for label, _, line in duel.bars(record)]
    assert shown == [
        ("Hugging Face + PEFT", 300), ("Unsloth", 500), ("tigon, Unsloth's memory", 600), ("tigon, 24 GiB", 700),
        ("Unsloth, most kept *", 800), ("tigon, most kept *", 900),
    ]  # fmt: skip
    record["measurements"] = [one for one in record["measurements"] if one["entry"] != "unsloth-none"]
    assert [label for label, _, _ in duel.bars(record)][-1] == "tigon, 24 GiB", "tigon's has nothing to stand beside"
