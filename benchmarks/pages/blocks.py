"""The blocks of docs/study.md: tables and sentences from a record, with figures that a source published."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.pages import published
from tigon.models.loading.presets import PRESETS
from tigon.report.table import Table
from tigon.sweep import failures
from tigon.sweep.charts import GIB, axis_words
from tigon.sweep.report import ROWS_WORDS, left_out
from tigon.sweep.results import in_processes

Row = Mapping[str, Any]
Results = Mapping[str, Any]
NONE = "–"
ANOTHER_LOSS = 0.5
"""Nats after the ladder's steps. Precisions and other random weights of one seed differ by less than 0.1."""
FOR_LONG_SEQUENCES = {"+ tiled MLPs", "tiled-mlp", "grouped-attention", "checkpointing-offload"}
"""Left out of tables at 4 x 1024 tokens, where these techniques do not change the peak. Their pages show other runs."""
BATCH, SEQUENCE, MODEL = "train.batch_size", "data.sequence_length", "model.name"


# --- parts of every block --------------------------------------------------------------------------------------------


def dates(results: Results) -> list[str]:
    """The days on which the points were measured."""
    return list(results["environment"]["dates"]) if results["environment"] else []


def provenance(results: Results) -> str:
    """Card, versions, commits, dates, and the settings of this record; docs/sweep.md describes the others."""
    environment = results["environment"]
    if environment is None:
        return "No point measured yet."
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    device = environment["device"]
    if environment["memory_bytes"]:
        device += f" ({environment['memory_bytes'] / GIB:.1f} GiB, driver {environment['driver']})"
    sentences = [
        f"`{results['command']}` on {device}; {versions}; tigon at commit {', '.join(environment['tigon_commits'])}; "
        f"{', '.join(environment['dates'])}.",
        f"Each point took {results['steps']} steps, {results['warmup']} of them untimed{in_processes(results)}.",
        ROWS_WORDS[results["rows"]],
    ]
    if results["memory_limit_bytes"]:
        sentences.append(
            f"The limit of {results['memory_limit_bytes'] / GIB:.1f} GiB includes the CUDA context and NCCL."
        )
    if unchecked := sorted({row["variant"] for row in results["points"] if row["unchecked"]}):
        sentences.append(
            f"`tigon train` refuses these combinations, but the sweep measured them: {', '.join(unchecked)}."
        )
    if wrong := left_out(results):
        sentences.append(wrong)
    missing = [row["id"] for row in results["points"] if row["status"] == failures.NOT_MEASURED]
    if missing:
        sentences.append(f"Not measured yet: {', '.join(missing)}.")
    return " ".join(sentences)


def _rows(results: Results, **fixed: Any) -> list[Row]:
    return [row for row in results["points"] if all(row.get(name) == value for name, value in fixed.items())]


def _ok(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == failures.OK]


def _at(results: Results, variant: str, **axes: Any) -> Row | None:
    """The point of a variant at these values of its axes."""
    wanted = {name.replace("__", "."): value for name, value in axes.items()}
    for row in results["points"]:
        if row["variant"] == variant and all(row["axes"].get(name) == value for name, value in wanted.items()):
            return dict(row)
    return None


def _values(results: Results, axis: str) -> list[Any]:
    values = list(dict.fromkeys(row["axes"][axis] for row in results["points"] if axis in row["axes"]))
    return sorted(values) if all(isinstance(value, (int, float)) for value in values) else values


def _gib(row: Row | None) -> str:
    if row is None:
        return NONE
    if row["status"] != failures.OK:
        return failures.mark(str(row["status"]))
    return f"{row['peak_allocated_bytes'] / GIB:.2f}"


def _speed(row: Row | None) -> str:
    return f"{row['tokens_per_s']:,.0f}" if row is not None and row["status"] == failures.OK else NONE


def _predicted_gib(row: Row | None) -> str:
    predicted_bytes = row.get("predicted_allocated_bytes") if row is not None else None
    return f"{predicted_bytes / GIB:.2f}" if predicted_bytes else NONE


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """A table whose first `words` columns are text."""
    return Table(titles, rows, texts=range(words)).markdown()


def _share(value: float) -> str:
    return f"{100 * value:+.0f} %".replace("+0 %", "0 %").replace("-0 %", "0 %")


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


# --- batch and sequence ----------------------------------------------------------------------------------------------


def batch(results: Results) -> str:
    """Peak and throughput per batch size, beside the study's."""
    parts = [_by_axis(results, BATCH, study=True), _list(_findings(results, BATCH))]
    setting = published.STUDY.setting
    parts.append(f"The study's columns: {setting}. The end of the page lists how its set-up differs from ours.")
    return "\n\n".join(part for part in parts if part)


def sequence(results: Results) -> str:
    """Peak and throughput per sequence length."""
    findings = list(_findings(results, SEQUENCE))
    findings.append(
        f"The study's longest sequences: 4 x {published.STUDY_LONGEST_SEQUENCE:,} tokens with Liger, in about "
        f"{published.STUDY_LONGEST_GB:g} GB."
    )
    return "\n\n".join([_by_axis(results, SEQUENCE, study=False), _list(findings)])


def _by_axis(results: Results, axis: str, *, study: bool) -> str:
    """GiB, predicted GiB and tokens/s of each variant along an axis."""
    titles, rows = [axis_words(axis)], []
    for variant in results["variants"]:
        titles += [f"{variant}, GiB", "predicted", "tokens/s"]
    titles += ["study unpatched, GiB", "study Liger, GiB"] if study else []
    for value in _values(results, axis):
        cells = [f"{value:,}"]
        for variant in results["variants"]:
            row = _at(results, variant, **{axis.replace(".", "__"): value})
            cells += [_gib(row), _predicted_gib(row), _speed(row)]
        if study:
            theirs = published.STUDY_PEAK_GIB.get(value)
            cells += [NONE, NONE] if theirs is None else ["OOM" if gib is None else f"{gib:.1f}" for gib in theirs]
        rows.append(cells)
    return _table(titles, rows)


def _findings(results: Results, axis: str) -> list[str]:
    """The largest value of each variant, and what each variant saves at the largest value that all of them ran."""
    sentences, largest = [], []
    for variant in results["variants"]:
        ran = [row["axes"][axis] for row in _ok(_rows(results, variant=variant))]
        if ran:
            largest.append(f"{variant} {max(ran):,}")
    if largest:
        sentences.append(f"Most {axis_words(axis)} that ran: {', '.join(largest)}.")
    if any(row["status"] == failures.SKIPPED for row in results["points"]):
        sentences.append("(OOM) marks points that were not tried because a smaller one ran out of memory.")
    base = results["baseline"]
    common = [value for value in _values(results, axis) if _all_ran(results, axis, value)]
    if common:
        value = common[-1]
        reference = _at(results, base, **{axis.replace(".", "__"): value})
        assert reference is not None
        for variant in results["variants"]:
            row = _at(results, variant, **{axis.replace(".", "__"): value})
            if row is not None and variant != base:
                memory = row["peak_allocated_bytes"] / reference["peak_allocated_bytes"] - 1
                speed = row["tokens_per_s"] / reference["tokens_per_s"] - 1
                sentences.append(
                    f"At {value:,}, {variant} against {base}: memory {_share(memory)}, tokens/s {_share(speed)}."
                )
    return sentences


def _all_ran(results: Results, axis: str, value: Any) -> bool:
    rows = [row for row in results["points"] if row["axes"].get(axis) == value]
    return len(_ok(rows)) == len(results["variants"])


def extreme(results: Results) -> str:
    """The largest value that ran, and the smallest that ran out of memory."""
    (axis,) = results["axes"]
    rows = []
    for variant in results["variants"]:
        own = _rows(results, variant=variant)
        ran = max(_ok(own), key=lambda row: row["axes"][axis], default=None)
        out = min(
            (row for row in own if row["status"] == failures.OUT_OF_MEMORY),
            key=lambda row: row["axes"][axis],
            default=None,
        )
        most = NONE if ran is None else f"{ran['axes'][axis]:,}"
        rows.append(
            [
                variant,
                most,
                _gib(ran),
                _predicted_gib(ran),
                _speed(ran),
                NONE if out is None else f"{out['axes'][axis]:,}",
            ]
        )
    theirs = {
        BATCH: f"The study's largest batch with Liger: {published.STUDY_LARGEST_BATCH} x 1024 tokens.",
        SEQUENCE: f"The study's longest sequences with Liger: 4 x {published.STUDY_LONGEST_SEQUENCE:,} tokens.",
    }[axis]
    titles = ["", f"most {axis_words(axis)}", "GiB", "predicted", "tokens/s", "out of memory at"]
    return f"{_table(titles, rows)}\n\n{theirs}"


# --- techniques ------------------------------------------------------------------------------------------------------


def ladder(results: Results) -> str:
    """Each rung: its memory, the change from the rung it is compared with, and its loss and that of the first rung."""
    rows, above = [], None
    first = next(iter(_ok(results["points"])), None)
    nearest = {after["id"]: before for before, after in _rung_pairs(results)}
    for row in results["points"]:
        if row["variant"] in FOR_LONG_SEQUENCES:
            continue
        change = speed = NONE
        before = nearest.get(row["id"])
        if before is not None:
            change = f"{(row['peak_allocated_bytes'] - before['peak_allocated_bytes']) / GIB:+.2f}"
            change += "" if before is above else f" from {before['variant'].lstrip('+ ')}"
            speed = _share(row["tokens_per_s"] / before["tokens_per_s"] - 1)
        rows.append([row["variant"], _gib(row), _predicted_gib(row), change, _speed(row), speed, *_loss(row, first)])
        above = row if row["status"] == failures.OK else above
    titles = [
        "rung",
        "GiB",
        "predicted",
        "GiB against the rung before",
        "tokens/s",
        "tokens/s against the rung before",
        f"loss after {results['steps']} steps",
        "against the first rung",
    ]
    return _table(titles, rows)


def _rung_pairs(results: Results) -> list[tuple[Row, Row]]:
    """(rung to compare with, rung) for each rung that ran.

    A rung is compared with the earlier rung that differs in the fewest keys, or with the latest of several such rungs.
    That is the rung above it, unless a rung removes a technique.
    """
    ran = _ok(results["points"])
    return [(min(reversed(ran[:at]), key=partial(_changed, row)), row) for at, row in enumerate(ran) if at]


def _changed(one: Row, other: Row) -> int:
    """How many keys of the recipe differ."""
    return sum(one["keys"].get(key) != other["keys"].get(key) for key in {*one["keys"], *other["keys"]})


def techniques(results: Results) -> str:
    """Each technique against the baseline, sorted by memory, the smallest first."""
    reference = next(iter(_ok(_rows(results, variant=results["baseline"]))), None)
    ran = sorted(_ok(results["points"]), key=lambda row: int(row["peak_allocated_bytes"]))
    rows = []
    for row in [*ran, *(row for row in results["points"] if row["status"] != failures.OK)]:
        if row["variant"] in FOR_LONG_SEQUENCES:
            continue
        memory = speed = NONE
        if row["status"] == failures.OK and reference is not None and row is not reference:
            memory = _share(row["peak_allocated_bytes"] / reference["peak_allocated_bytes"] - 1)
            speed = _share(row["tokens_per_s"] / reference["tokens_per_s"] - 1)
        rows.append(
            [row["variant"], _gib(row), _predicted_gib(row), memory, _speed(row), speed, *_loss(row, reference)]
        )
    base = results["baseline"]
    titles = [
        "technique",
        "GiB",
        "predicted",
        f"against {base}",
        "tokens/s",
        f"against {base}",
        f"loss after {results['steps']} steps",
        f"against {base}",
    ]
    failed = [
        f"{row['id']}: {row['status']}. {row['detail']}"
        for row in results["points"]
        if row["status"] in (failures.FAILED, failures.REFUSED, failures.TIMED_OUT)
    ]
    return _table(titles, rows) + (f"\n\n{_list(failed)}" if failed else "")


def _loss(row: Row, reference: Row | None) -> list[str]:
    if row["status"] != failures.OK or row.get("last_loss") is None:
        return [NONE, NONE]
    if reference is None or reference is row or reference.get("last_loss") is None:
        return [f"{row['last_loss']:.4f}", NONE]
    return [f"{row['last_loss']:.4f}", f"{row['last_loss'] - reference['last_loss']:+.4f}"]


# --- the paper's models ----------------------------------------------------------------------------------------------


def models(results: Results) -> str:
    """Memory and throughput of each model and batch, gains beside the paper's and the AMD port's."""
    theirs = {"Liger in the paper": published.PAPER_GAINS, "Liger in the AMD port": published.AMD_GAINS}
    sources = "; ".join(f"{source.name} ({source.setting})" for source in (published.PAPER, published.AMD))
    return f"{_compared(results, theirs)}\n\nOthers published the last two columns: {sources}."


def steps(results: Results) -> str:
    """Memory and throughput of each setting, beside the baseline's."""
    return _compared(results, {})


def _compared(results: Results, theirs: Mapping[str, Mapping[str, published.Gain]]) -> str:
    """One line per combination of the axes: the figures of each variant, its gain over the baseline, and the gain that
    others published for the model."""
    others = [variant for variant in results["variants"] if variant != results["baseline"]]
    rows = []
    for axes in dict.fromkeys(tuple(row["axes"].items()) for row in results["points"]):
        own = {v: _at(results, v, **{k.replace(".", "__"): value for k, value in axes}) for v in results["variants"]}
        cells = [f"{value:,}" if isinstance(value, int) else str(value) for _, value in axes]
        for row in own.values():
            cells += [_gib(row), _speed(row)]
        cells += [_gain(own[variant], own[results["baseline"]]) for variant in others]
        rows.append([*cells, *(_published(gains.get(dict(axes)[MODEL])) for gains in theirs.values())])
    titles = [axis_words(axis) for axis in results["axes"]]
    numbers = [isinstance(_values(results, axis)[0], int) for axis in results["axes"]]
    for variant in results["variants"]:
        titles += [f"{variant}, GiB", "tokens/s"]
    titles += [f"{variant}: memory, tokens/s" for variant in others]
    titles += theirs
    texts = [number for number, is_number in enumerate(numbers) if not is_number]
    return Table(titles, rows, texts=texts).markdown()


def _gain(row: Row | None, base: Row | None) -> str:
    if row is None or base is None or row["status"] != failures.OK or base["status"] != failures.OK:
        return NONE
    memory = row["peak_allocated_bytes"] / base["peak_allocated_bytes"] - 1
    return f"{_share(memory)}, {_share(row['tokens_per_s'] / base['tokens_per_s'] - 1)}"


def _published(gain: published.Gain | None) -> str:
    if gain is None:
        return NONE
    sequences = f" ({gain.batch} sequences)" if gain.batch else ""
    return f"{_share(gain.memory)}, {_share(gain.tokens_per_s)}{sequences}"


# --- blocks of all records, or of none --------------------------------------------------------------------------------


def estimate(_: Mapping[str, Results]) -> str:
    """Activation checkpoints and logits by the study's formulas."""
    shape = PRESETS["llama-3.2-1b"]
    hidden, layers, vocab = shape["hidden_size"], shape["num_hidden_layers"], shape["vocab_size"]
    rows = []
    for size, length in ((4, 1024), (8, 1024), (16, 1024), (112, 1024), (4, 24576)):
        tokens = size * length
        checkpoints, logits = tokens * hidden * 2 * layers, tokens * vocab * 4 * 3
        rows.append(
            [f"{size} x {length:,}", f"{checkpoints / GIB:.2f}", f"{logits / GIB:.2f}", f"{logits / checkpoints:.0f}"]
        )
    return _table(["sequences x tokens", "checkpoints, GiB", "logits, GiB", "logits / checkpoints"], rows)


Finding = Callable[[Mapping[str, Results]], "str | None"]


def advice(records: Mapping[str, Results]) -> str:
    """Recommendations, the most effective first, each with its measured number. Skips those without a measurement."""
    findings: tuple[Finding, ...] = (
        _fused_head,
        _cheapest_rung,
        partial(
            _most, name="largest-batch", axis=BATCH, what="largest batch in 24 GiB is {:,} sequences of 1024 tokens"
        ),
        partial(_most, name="longest-sequence", axis=SEQUENCE, what="longest sequence in 24 GiB has {:,} tokens"),
        _fastest_technique,
    )
    return _list(line for line in (finding(records) for finding in findings) if line)


def _fused_head(records: Mapping[str, Results]) -> str | None:
    results = records.get("batch")
    if results is None or "tigon" not in results["variants"]:
        return None
    common = [value for value in _values(results, BATCH) if _all_ran(results, BATCH, value)]
    if not common:
        return None
    value = common[-1]
    base, without, fused = (
        _at(results, variant, train__batch_size=value) for variant in ("unpatched", "all but linear CE", "tigon")
    )
    if base is None or without is None or fused is None:
        return None
    saved = base["peak_allocated_bytes"] - fused["peak_allocated_bytes"]
    head = without["peak_allocated_bytes"] - fused["peak_allocated_bytes"]
    return (
        f"Never hold copies of the logits. At {value} x 1024 tokens tigon's kernels save {saved / GIB:.1f} of "
        f"{base['peak_allocated_bytes'] / GIB:.1f} GiB. A loss that writes its gradient over the logits saves "
        f"{(saved - head) / GIB:.1f} GiB of that, and computing the logits in chunks saves {head / GIB:.1f} GiB."
    )


def _cheapest_rung(records: Mapping[str, Results]) -> str | None:
    """The memory and time of each rung. Rungs that change the loss come last, because they change the result."""
    results = records.get("ladder")
    ran = _ok(results["points"]) if results else []
    free, paid, other = [], [], []
    for before, after in _rung_pairs(results) if results else []:
        gib = (before["peak_allocated_bytes"] - after["peak_allocated_bytes"]) / GIB
        if gib <= 0.05:  # less rounds to 0.0 in the text
            continue
        what, slower_s = after["variant"].lstrip("+ "), after["step_s"] - before["step_s"]
        learned = (after.get("last_loss") or 0) - (ran[0].get("last_loss") or 0)
        if abs(learned) > ANOTHER_LOSS:
            other.append(f"{what} ({gib:.1f} GiB, loss {learned:+.1f})")
        elif slower_s > 0:
            paid.append(f"{what} ({gib:.1f} GiB for {1e3 * slower_s:.0f} ms per step)")
        else:
            free.append(f"{what} ({gib:.1f} GiB)")
    groups = {
        "First take the techniques that save memory and cost no time": free,
        "Then take those that cost time": paid,
        "These change the loss after the same number of steps, here against the first rung": other,
    }
    return " ".join(f"{start}: {', '.join(rungs)}." for start, rungs in groups.items() if rungs) or None


def _most(records: Mapping[str, Results], name: str, axis: str, what: str) -> str | None:
    """A sentence about the largest value on the axis, which fills the placeholder in `what`."""
    results = records.get(name)
    ran = _ok(results["points"]) if results else []
    if not ran:
        return None
    row = max(ran, key=lambda row: row["axes"][axis])
    return (
        f"The {what.format(row['axes'][axis])} ({row['variant']}): "
        f"{row['peak_allocated_bytes'] / GIB:.1f} GiB, {row['tokens_per_s']:,.0f} tokens/s."
    )


def _fastest_technique(records: Mapping[str, Results]) -> str | None:
    results = records.get("techniques")
    ran = _ok(results["points"]) if results else []
    if not ran:
        return None
    fast, lean = (
        max(ran, key=lambda row: float(row["tokens_per_s"])),
        min(ran, key=lambda row: int(row["peak_allocated_bytes"])),
    )
    return (
        f"Among the single techniques at 4 x 1024 tokens, {fast['variant']} is the fastest "
        f"({fast['tokens_per_s']:,.0f} tokens/s) and {lean['variant']} needs the least memory "
        f"({lean['peak_allocated_bytes'] / GIB:.1f} GiB)."
    )
