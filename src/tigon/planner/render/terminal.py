"""Formats a plan as a mapping for JSON and as text for a terminal: tables, a bar, the recipes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tigon.planner.engines.non_allocator_memory import non_allocator_bytes
from tigon.planner.estimate import PHASES, Estimate
from tigon.planner.gpus import GIB, Gpu
from tigon.planner.render import as_recipe
from tigon.planner.render.json_names import settings_mapping
from tigon.planner.request import Request
from tigon.planner.search import space
from tigon.planner.search.largest_batch import MaxSizes
from tigon.planner.search.longest import LongestRow
from tigon.planner.search.option import Option
from tigon.planner.search.recommend import Plan, Recommendation, Rejected, against, label
from tigon.planner.simulate.ledger import COMPONENTS
from tigon.recipe.keys import OBJECTIVE_SECTIONS
from tigon.report.chart import MEMORY_COLOURS
from tigon.report.table import Table
from tigon.techniques import TECHNIQUES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

_BAR_WIDTH = 64
_SHOWN_REJECTED = 3


# --- JSON ------------------------------------------------------------------------------------------------------------


def as_mapping(plan: Plan) -> dict[str, Any]:
    """The whole plan as JSON values, in bytes and seconds."""
    option, request, gpu = plan.option, plan.option.request, plan.gpu
    return {
        "model": request.model,
        "batch": request.batch,
        "seq": request.seq,
        "evaluated": request.evaluated,
        "choices": settings_mapping(request.settings),
        **_objective_sections(request),
        "gpu": {name: getattr(gpu, name) for name in ("name", "memory_bytes", "source")},
        **asdict(option.estimate),
        "outside_bytes": non_allocator_bytes(gpu, request.settings),
        "fits": option.fits(gpu, plan.problem.host_bytes),
        "headroom": space.HEADROOM,
        "largest_batch": _max_sizes(plan, "largest_batch"),
        "longest_sequence": _max_sizes(plan, "longest_sequence"),
        "recommended": [_recommendation(plan, one) for one in plan.recommended],
        "fallback": plan.fallback,
        "refused": list(plan.refused),
    }


def _objective_sections(request: Request) -> dict[str, dict[str, Any] | None]:
    """Each recipe section that belongs to an objective -> its dotted keys; None for those of other objectives."""
    keys = request.objective.recipe_keys()
    return {
        section: {key: value for key, value in keys.items() if key.startswith(f"{section}.")} or None
        for section in OBJECTIVE_SECTIONS
    }


def _max_sizes(plan: Plan, name: str) -> dict[str, int | None]:
    best: MaxSizes | None = plan.best_max_sizes
    return {"requested": getattr(plan.max_sizes, name), "recommended": None if best is None else getattr(best, name)}


def _configuration(request: Request) -> dict[str, Any]:
    return {
        "label": label(request.settings),
        "batch": request.batch,
        "choices": settings_mapping(request.settings),
        "changes": space.change_names(request),
    }


def _recommendation(plan: Plan, one: Recommendation) -> dict[str, Any]:
    request = one.option.request
    unshown = ("phases", "peak_phase", "notes")
    return {
        **_configuration(request),
        **{name: value for name, value in asdict(one.option.estimate).items() if name not in unshown},
        "precision_cost": dict(space.changes(request.settings)),
        "needs": needs(one.option),
        "cheaper": [_rejected(other) for other in one.cheaper],
        "command": _command(plan, one),
        "yaml": as_recipe.yaml_text(request),
    }


def _rejected(other: Rejected) -> dict[str, Any]:
    size = {"batch": other.batch, "device_bytes": other.device_bytes}
    return {"label": label(other.settings), **size, "reason": other.reason}


def needs(option: Option) -> list[str]:
    """Packages that a recipe needs beyond PyTorch and transformers."""
    used = (technique for technique in TECHNIQUES.values() if technique.used_by(option.request.settings))
    return sorted({package for technique in used for package in technique.needs})


# --- the terminal ----------------------------------------------------------------------------------------------------


def show(plan: Plan, console: Console, *, details: bool = False) -> None:
    """Print the plan. details: also what every recommendation changes and rejects, its command, and the first as YAML.

    The short form is what a person reads before a run; the details are for one who compares the recommendations.
    """
    _print(console, headline(plan), style="bold")
    _show_option(plan, console)
    if plan.recommended:
        _recommendations(plan, console)
        if details:
            _details(plan, console)
    else:
        console.print(f"\n[bold]No recipe that was tried fits.[/bold] {_what_to_change(plan)}", soft_wrap=True)
    _reach(plan, console)
    if not details:
        console.print("--explain shows each number's parts, why other recipes were rejected, and every command.")


def _print(console: Console, text: str, style: str | None = None) -> None:
    """Print a text that may hold brackets; the terminal wraps it."""
    console.print(text, markup=False, style=style, soft_wrap=True)


def headline(plan: Plan) -> str:
    """The answer in one line: whether the run fits as it was asked for and, if not, whether another recipe does."""
    option, request, gpu = plan.option, plan.option.request, plan.gpu
    gpus = f"{request.gpus} x {gpu.name}" if request.gpus > 1 else gpu.name
    where = f"{gpus} ({gib(gpu.memory_bytes)})"
    micro_batches = f" in {request.micro_batches} micro-batches" if request.micro_batches > 1 else ""
    samples = f"{_samples(request.samples_per_step)} of {request.seq:,} tokens"
    run = f"{samples}{_sequences(request)}{micro_batches}"
    if option.fits(gpu, plan.problem.host_bytes):
        used, speed = gib(option.estimate.device_bytes), f"{option.estimate.tokens_per_s:,.0f} tokens/s"
        return f"{request.model} fits {where}: {run}, {used}, {speed}"
    if not plan.recommended:
        return f"{request.model} does not fit {where} with {run}, and no recipe that was tried does"
    changed = f" with {plan.fallback}" if plan.fallback else ""
    found = "1 recipe does" if len(plan.recommended) == 1 else f"{len(plan.recommended)} recipes do"
    return f"{request.model} does not fit {where} as asked, with {run}; {found}{changed}, see below"


def _what_to_change(plan: Plan) -> str:
    request, tried = plan.option.request, plan.problem.fallbacks
    ways = ["Lower --batch or --seq", "leave out options so that they may change", "add GPUs"]
    if not request.settings.lora.used and not tried:
        ways.append("train adapters with --method lora")
    elif not request.settings.lora.quantize and not tried:
        ways.append("keep the frozen weights in 4 bits with --method qlora")
    return f"{', '.join(ways[:-1])}, or {ways[-1]}."


def gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:.2f} GiB"


def _show_option(plan: Plan, console: Console) -> None:
    option, gpu = plan.option, plan.gpu
    result = option.estimate
    objective = option.request.objective.description()
    asked = ", ".join(filter(None, (label(option.request.settings), objective)))
    if plan.problem.auto:
        divides = " and micro-batches" if plan.problem.auto_divides else ""
        asked += f" (checkpointing{divides} chosen by auto)"
    _print(console, f"as asked: {asked}")
    console.print(_table(result))
    console.print(bar(result, gpu))
    _print(console, verdict(option, gpu, plan.problem.host_bytes))
    for note in result.notes:
        _print(console, f"note: {note}")


def verdict(option: Option, gpu: Gpu, host_bytes: int | None = None) -> str:
    """One line: peak, whether it fits, time. host_bytes: the host memory that offloading may use; None: any amount."""
    result, left = option.estimate, gpu.memory_bytes - option.estimate.device_bytes
    fits = f"fits, {gib(left)} to spare" if left >= 0 else f"does not fit: {gib(-left)} too much"
    if 0 <= left < space.HEADROOM * gpu.memory_bytes:
        fits += ", less than a prediction may miss"
    if host_bytes is not None and option.host_excess(host_bytes) > 0:
        needed = f"offloading needs {gib(option.all_host_bytes)} of host memory, and only {gib(host_bytes)} may be used"
        fits = f"does not fit: {needed}" if left >= 0 else f"{fits}, and {needed}"
    places = {"on the host": result.host_bytes, "on NVMe": result.nvme_bytes}
    elsewhere = "".join(f", {gib(size)} {where}" for where, size in places.items() if size)
    return (
        f"{fits}. Peak {gib(result.peak_allocated_bytes)} allocated ({result.peak_phase}), "
        f"{gib(result.peak_reserved_bytes)} reserved, {gib(result.device_bytes)} on the device{elsewhere}; "
        f"{seconds(result.step_s)} per step, {result.tokens_per_s:,.0f} tokens/s"
    )


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _table(result: Estimate) -> RichTable:
    """A table of the components at the peak, next to the peak of each phase."""
    from rich.table import Table as RichTable

    table = RichTable(box=None, header_style="bold", pad_edge=False)
    for title, side in (("at the peak", "left"), ("GiB", "right"), ("  phase", "left"), ("peak GiB", "right")):
        table.add_column(title, justify=side)  # type: ignore[arg-type]
    for i in range(max(len(COMPONENTS), len(PHASES))):
        component, phase = COMPONENTS[i], PHASES[i]
        mark = " <" if phase == result.peak_phase else ""
        table.add_row(
            f"[{MEMORY_COLOURS[component][0]}]█[/] {component}",
            f"{result.components[component] / GIB:.2f}",
            f"  {phase}{mark}",
            f"{result.phases[phase] / GIB:.2f}",
        )
    return table


def bar(result: Estimate, gpu: Gpu) -> Text:
    """The components as one stacked bar, with the GPU's limit as a line through it."""
    from rich.text import Text

    parts = [(MEMORY_COLOURS[name][0], result.components[name]) for name in COMPONENTS]
    parts.append(("#d1d5db", result.device_bytes - result.peak_allocated_bytes))  # cached, and outside the allocator
    scale = _BAR_WIDTH / max(gpu.memory_bytes, result.device_bytes)
    limit = min(_BAR_WIDTH - 1, round(gpu.memory_bytes * scale))
    cells: list[str] = []
    total = 0.0
    for colour, size in parts:
        total += size * scale
        cells += [colour] * (round(total) - len(cells))
    text = Text()
    for i in range(_BAR_WIDTH):
        filled = i < len(cells)
        if i == limit:
            text.append("┃", style="bold red")
        else:
            text.append("█" if filled else "·", style=cells[i] if filled else "dim")
    text.append(f"  ┃ {gib(gpu.memory_bytes)}", style="bold red")
    return text


def _recommendations(plan: Plan, console: Console) -> None:
    room = gib(plan.problem.gpu.memory_bytes)
    if plan.fallback:
        asked = plan.problem.request.settings.lora
        on_host = [one.option.all_host_bytes for one in plan.recommended if one.option.request.settings.lora == asked]
        what = f"what fits keeps {gib(min(on_host))} on the host" if on_host else "nothing that was tried fits"
        console.print(f"\n[bold]Without {plan.fallback}, {what}.[/bold]")
    order = "smallest change of the numbers first"
    console.print(f"\n[bold]Recipes that fit[/bold] in {room} ({space.HEADROOM:.0%} stay free), {order}")
    rows = []
    for number, one in enumerate(plan.recommended, 1):
        result, request = one.option.estimate, one.option.request
        batch = f"{request.batch} x {request.micro_batches}"
        figures = _figures(result, result.host_bytes)
        rows.append((str(number), label(request.settings), batch, *figures, _changes(plan, request)))
    titles = ("#", "recipe", "batch", *_FIGURES, "changes")
    Table(titles, rows, texts=(1, len(titles) - 1)).show(console)
    _print(console, f"\nTrain with the first: {_command(plan, plan.recommended[0])}")
    missing = not_installed(needs(plan.recommended[0].option))
    if missing:
        console.print(f"It needs {', '.join(missing)}, which this Python does not have.", markup=False)


_FIGURES = ("GPU GiB", "host GiB", "step", "tokens/s")


def _figures(result: Estimate, host_bytes: int) -> tuple[str, ...]:
    """The cells under `_FIGURES`."""
    memory = (f"{result.device_bytes / GIB:.2f}", f"{host_bytes / GIB:.2f}")
    return (*memory, seconds(result.step_s), f"{result.tokens_per_s:,.0f}")


def _changes(plan: Plan, request: Request) -> str:
    """What changes a recipe's numbers compared with what was asked for."""
    asked = space.change_names(plan.problem.request)
    return ", ".join(name for name in space.change_names(request) if name not in asked) or "nothing"


def not_installed(packages: Iterable[str]) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def _details(plan: Plan, console: Console) -> None:
    for number, one in enumerate(plan.recommended, 1):
        request = one.option.request
        details = [f"{name}: {cost}" for name, cost in space.changes(request.settings).items()]
        if space.crosses_documents(request):
            details.append(f"{space.CROSS_DOCUMENT}: tokens attend to earlier documents of their sample.")
        packages = needs(one.option)
        if packages:
            details.append(f"needs {', '.join(packages)}")
        rejected = sorted(one.cheaper, key=lambda other: other.device_bytes)[:_SHOWN_REJECTED]
        details += [
            f"rejected: {against(request.settings, other.settings, other.batch)}: {other.reason}" for other in rejected
        ]
        console.print(f"\n{number}. {label(request.settings)}", markup=False, style="bold")
        for line in (*details, _command(plan, one)):
            _print(console, f"   {line}")
    if not plan.problem.command:
        console.print(f"\nthe first as {as_recipe.RECIPE_FILE}; set your data and steps:", markup=False)
        console.print(as_recipe.yaml_text(plan.recommended[0].option.request), markup=False)


def _command(plan: Plan, one: Recommendation) -> str:
    """The command that trains a recommendation: of the user's recipe if the plan is of one."""
    base = plan.problem.command
    return as_recipe.command(one.option.request, plan.problem.request if base else None, base)


def _sequences(request: Request) -> str:
    """The sequences of a micro-batch, if they are not its samples: a pair has two, a prompt gets a completion."""
    sequences, tokens = request.objective.sequences(request.batch), request.objective.sequence_tokens(request.seq)
    return "" if (sequences, tokens) == (request.batch, request.seq) else f" ({sequences:,} sequences of {tokens:,})"


def _samples(count: int) -> str:
    return f"{count:,} sample{'' if count == 1 else 's'}"


def _reach(plan: Plan, console: Console) -> None:
    request = plan.option.request
    as_asked = "as asked"
    if plan.problem.auto:
        on_host = request.settings.train.checkpointing == "offload"
        as_asked += ", with the layers' inputs on the host" if on_host else ", all layers recomputed"
    lines = [(as_asked, plan.max_sizes, request)]
    if plan.best_max_sizes is not None:
        lines.append(("recipe 1", plan.best_max_sizes, plan.recommended[0].option.request))
    for name, reach, of in lines:
        batch = _samples(reach.largest_batch) if reach.largest_batch else "none"
        seq = f"{reach.longest_sequence:,} tokens" if reach.longest_sequence else "none"
        longest = f"longest sequence with {_samples(of.batch)}: {seq}"
        _print(console, f"{name}: largest micro-batch of {of.seq:,} tokens: {batch}; {longest}")


def show_longest(plan: Plan, rows: Sequence[LongestRow], console: Console) -> None:
    """Print the longest row of each configuration, the longest first, under a line that names it."""
    batch, gpu = rows[0].request.batch, plan.gpu
    rows = sorted(rows, key=lambda row: -row.request.seq if row.option is not None else 0)
    best = rows[0]
    answer = "no row fits" if best.option is None else f"rows of up to {best.request.seq:,} tokens fit"
    how = "" if best.option is None else f", with {label(best.request.settings)}"
    line = f"{best.request.model} on {gpu.name} ({gib(gpu.memory_bytes)}): {answer}{how}"
    _print(console, line, style="bold")
    console.print(f"Longest row in micro-batches of {_samples(batch)}")
    cells = []
    for row in rows:
        option, tokens, figures = row.option, "none", ("",) * len(_FIGURES)
        if option is not None:
            tokens, figures = f"{row.request.seq:,}", _figures(option.estimate, option.all_host_bytes)
        cells.append((tokens, label(row.request.settings), *figures, _changes(plan, row.request)))
    titles = ("tokens", "recipe", *_FIGURES, "changes")
    Table(titles, cells, texts=(1, len(titles) - 1)).show(console)
    console.print()


def longest_mapping(row: LongestRow) -> dict[str, Any]:
    """The longest row of a configuration as JSON values."""
    option = row.option
    return {
        **_configuration(row.request),
        "longest_sequence": row.request.seq if option else 0,
        "host_bytes": option.all_host_bytes if option else None,
        **{name: getattr(option.estimate, name) if option else None for name in _LONGEST_FIGURES},
    }


_LONGEST_FIGURES = ("device_bytes", "step_s", "tokens_per_s")
