"""
The tables and pictures of docs/results.md and docs/method.md, from the rows of their runs.

    python -m bench results

A difference is paired by seed: all methods of a seed draw their prompts in the same order. An
interval is Student's t over seeds, 95 %.
"""

import itertools
import math
import statistics
from pathlib import Path

from runtime import log

METHODS = {  # title, and in pictures color and marker, so that colors need not be told apart
    "grpo": ("GRPO", "#000000", "o"),
    "nonzero": ("GRPO without zeros", "#777777", "P"),
    "adaptive": ("adaptive", "#009E73", "D"),
    "adaptive_prompts": ("adaptive, fewer prompts", "#E69F00", "d"),
    "pps": ("pps", "#56B4E9", "s"),
    "uniform": ("blind draws", "#CC79A7", "X"),
    "dppo": ("dppo", "#0072B2", "^"),
    "pods": ("PODS", "#999933", "v"),
    "cppo": ("CPPO", "#D55E00", "<"),
}
OURS = "adaptive"
# What others are compared with at equal steps. GRPO without zeros has GRPO's gradient.
REFERENCES = {"words": "nonzero"}  # else grpo
TITLES = {"arithmetic": "default task", "arithmetic-mixed": "mixed task", "words": "SmolLM2"}
FOLDER = Path("runs")
SAVINGS, RACE, LAW = FOLDER / "savings.jsonl", FOLDER / "race.jsonl", FOLDER / "law.jsonl"
REACH = FOLDER / "reach.jsonl"
FRESH = 30  # the lowest of its seeds in the tables. 10 to 12 chose flags, 20 to 29 had busy cores
OURS_BEST = {"arithmetic": "adaptive, 16 x 8", "arithmetic-mixed": "adaptive, 8 x 16"}  # searched
NONZERO_BEST = "nonzero, 32 x 4"  # its fastest batch
REACHED = {"arithmetic": (0.95, 0.98), "arithmetic-mixed": (0.9, 0.95)}
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, 1 to 9 degrees


def main() -> None:
    """Print all tables, and draw the pictures into runs/."""
    for name, table in tables().items():
        print(f"\n{name}\n\n{table}")
    draw_savings(read_runs(SAVINGS)).savefig(FOLDER / "savings.png")
    draw_race(read_runs(RACE)).savefig(FOLDER / "race.png")
    for task, runs in law_runs().items():
        draw_law(runs, task).savefig(FOLDER / f"law-{task}.png")


def tables() -> dict[str, str]:
    """All tables, by name."""
    saved, raced = read_runs(SAVINGS), read_runs(RACE)
    by_name = {}
    for setting in settings_of(saved):
        by_name[f"savings, {TITLES[setting]}"] = savings_table(saved, setting)
    for setting in settings_of(raced):
        by_name[f"race, {TITLES[setting]}"] = race_table(raced, setting)
    reached = [row for row in read_runs(REACH) if row["seed"] >= FRESH]
    for setting in settings_of(reached):
        by_name[f"seconds to an accuracy, {TITLES[setting]}"] = reach_table(reached, setting)
        ours, runs = OURS_BEST[setting], runs_to_an_accuracy(reached, setting)
        name = f"speed of {ours} over {NONZERO_BEST}, {TITLES[setting]}"
        by_name[name] = speed(runs[ours], runs[NONZERO_BEST], REACHED[setting][-1])
    for task, runs in law_runs().items():
        by_name[f"law, {TITLES[task]}"] = gains_table(runs, task)
    return by_name


# ---------------------------------------------------------------------------- equal steps


def savings_table(rows: list[dict], setting: str) -> str:
    """Markdown: the tokens that a method trains on, and for each number of candidates its accuracy
    minus the reference's, and its time over the reference's. The reference's line has its accuracy
    and its seconds."""
    counts, reference = sizes_of(rows, setting), REFERENCES.get(setting, "grpo")
    head = ["method", "trained on"]
    for count in counts:
        head += [f"{count} x 16: accuracy", f"{count} x 16: step time"]
    cells = []
    for name, (title, *_look) in METHODS.items():
        runs = by_seed(rows, setting, name, counts[0])
        if not runs:
            continue
        full = by_seed(rows, setting, reference, counts[0])
        full = {seed: full[seed] for seed in runs}
        trained = mean_of(runs, "trained") / mean_of(full, "trained")
        line = [title, f"{trained:.2f}"]
        for count in counts:
            runs = by_seed(rows, setting, name, count)
            full = by_seed(rows, setting, reference, count)
            if name == reference:
                seconds = statistics.median(row["seconds"] / row["made"] for row in runs.values())
                line += [show(interval(accuracies(runs))), f"{seconds:.2f} s a step"]
            else:
                apart = difference(accuracies(runs), accuracies(full))
                line += [show(interval(apart), "+"), f"{time_ratio(runs, full):.2f}"]
        cells.append(line)
    return as_markdown(head, cells)


def time_ratio(first: dict[int, dict], second: dict[int, dict]) -> float:
    """Median over seeds of the first runs' seconds over the second ones'."""
    both = [seed for seed in first if seed in second]
    return statistics.median(first[seed]["seconds"] / second[seed]["seconds"] for seed in both)


def read_runs(path: Path) -> list[dict]:
    """The rows of a file. GRPO without zeros was called grpo_zero."""
    rows = log.read_rows(path)
    return [row | {"method": row["method"].replace("grpo_zero", "nonzero")} for row in rows]


def draw_savings(rows: list[dict]):
    """A line for each method: its seconds a step over GRPO's, and its accuracy minus GRPO's. A row
    of panels for each task: its largest batch. Of words, which has another reference, there is only
    a table."""
    settings = [name for name in settings_of(rows) if name != "words"]
    shared = {"sharey": "row", "sharex": "col"}
    figure, panels = new_figure(len(settings), 2, (7, 3 * len(settings)), **shared)
    for (times, gaps), setting in zip(panels, settings, strict=True):
        count = sizes_of(rows, setting)[-1]
        full = by_seed(rows, setting, "grpo", count)
        for place, (name, (_title, color, _marker)) in enumerate(METHODS.items()):
            runs = by_seed(rows, setting, name, count)
            mean, half = interval(difference(accuracies(runs), accuracies(full)))
            times.barh(place, time_ratio(runs, full), color=color)
            gaps.errorbar(mean, place, xerr=half, color=color, marker="o", capsize=3)
        titles = [title for title, *_look in METHODS.values()]
        times.set(yticks=range(len(titles)), yticklabels=titles)
        times.set_title(f"{TITLES[setting]}, {count} x 16")
        gaps.axvline(0, color="#cccccc", lw=1, zorder=0)
        for panel in (times, gaps):
            panel.grid(visible=False, axis="y")
        times.set_xticks([0, 0.5, 1])
        times.invert_yaxis()
    panels[-1, 0].set_xlabel("step time, GRPO's = 1")
    panels[-1, 1].set_xlabel("accuracy minus GRPO's")
    return figure


# ---------------------------------------------------------------------------- until an accuracy


def runs_to_an_accuracy(rows: list[dict], setting: str) -> dict[str, dict[int, dict]]:
    """{method: {seed: row}} of one task."""
    of_methods = {}
    for row in rows:
        if row["setting"] == setting:
            of_methods.setdefault(row["method"], {})[row["seed"]] = row
    return of_methods


def reach_table(rows: list[dict], setting: str) -> str:
    """Markdown: the seconds until each of REACHED, as median and range, infinite if a run never
    had it; and the speed over GRPO without zeros with the same batch. Names end in their batch."""
    of_methods = runs_to_an_accuracy(rows, setting)
    cells = []
    for name, runs in of_methods.items():
        batch = name.rpartition(", ")[2]
        reference = of_methods[f"nonzero, {batch}"]
        line = [name]
        for target in REACHED[setting]:
            seconds = seconds_to(runs, target).values()
            median, low, high = statistics.median(seconds), min(seconds), max(seconds)
            line.append(f"{median:.0f} ({low:.0f} to {high:.0f})")
            line.append("1" if runs is reference else speed(runs, reference, target))
        cells.append(line)
    head = ["method"]
    for target in REACHED[setting]:
        head += [f"CPU seconds to {target}", "speed"]
    return as_markdown(head, cells)


def speed(runs: dict[int, dict], reference: dict[int, dict], target: float) -> str:
    """The reference's seconds over those of the runs: the geometric mean of the seeds in which both
    arrived, and its 95 % interval."""
    own, others = seconds_to(runs, target), seconds_to(reference, target)
    both = [s for s in own if s in others and math.isfinite(own[s] + others[s])]
    mean, half = interval({s: math.log(others[s] / own[s]) for s in both})
    low, high = math.exp(mean - half), math.exp(mean + half)
    return f"{math.exp(mean):.2f} ({low:.2f} to {high:.2f})"


def seconds_to(runs: dict[int, dict], target: float) -> dict[int, float]:
    """{seed: seconds until the first evaluation with at least this accuracy, or infinity}."""
    found = {}
    for seed, row in runs.items():
        reached = [seconds for _step, accuracy, seconds in row["curve"] if accuracy >= target]
        found[seed] = min(reached, default=math.inf)
    return found


# ---------------------------------------------------------------------------- equal seconds


def race_table(rows: list[dict], setting: str) -> str:
    """Markdown: each method's mean accuracy at each budget, and ours minus GRPO's, paired."""
    budgets = sizes_of(rows, setting)
    of_methods = {}  # name: {seed: accuracy} of each budget
    for name in METHODS:
        of_budgets = [accuracies(by_seed(rows, setting, name, budget)) for budget in budgets]
        if any(of_budgets):
            of_methods[name] = of_budgets
    cells = []
    for name, of_budgets in of_methods.items():
        cells.append([f"{METHODS[name][0]}, tuned", *map(show, map(interval, of_budgets))])
    gaps = map(interval, map(difference, of_methods[OURS], of_methods["grpo"]))
    cells.append([f"{OURS} - GRPO", *(show(gap, "+") for gap in gaps)])
    return as_markdown(["seconds", *(f"{budget:g}" for budget in budgets)], cells)


def draw_race(rows: list[dict]):
    """Wrong answers over the budget, a panel for each task. Bars are 95 % intervals."""
    settings = settings_of(rows)
    figure, (panels,) = new_figure(1, len(settings), (3.2 * len(settings) + 0.6, 3.8))
    for panel, setting in zip(panels, settings, strict=True):
        budgets = sizes_of(rows, setting)
        for place, (name, (title, color, marker)) in enumerate(METHODS.items()):
            runs = [accuracies(by_seed(rows, setting, name, budget)) for budget in budgets]
            if any(runs):
                mean, half = zip(*map(interval, runs), strict=True)
                wrong = [1 - accuracy for accuracy in mean]
                x = [budget * 1.03 ** (place - 4) for budget in budgets]  # apart
                style = {"color": color, "marker": marker, "ms": 5, "capsize": 3}
                panel.errorbar(x, wrong, half, label=title, **style)
        panel.set(title=TITLES[setting], xscale="log", yscale="log", xlabel="seconds of training")
        panel.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
        shares = [share for share in (0.003, 0.01, 0.03, 0.1, 0.3) if panel.get_ylim()[0] < share]
        panel.set_yticks(shares, [f"{100 * share:g} %" for share in shares])
        panel.minorticks_off()
    panels[0].set_ylabel("wrong answers, held out")
    add_legend(figure, panels)
    return figure


# ---------------------------------------------------------------------------- the law

# The rows of runs/law.jsonl were made by `git show 50494ff:bench/law.py`: 64 completions a step in
# groups of each size, GRPO without zeros (zero) and adaptive, until an accuracy is surely reached.
# Time is virtual, m x tokens sampled + tokens trained on, so one run of zero serves every m.
PREDICTED = FOLDER / "law-predicted.md"
PREDICTIONS = ("Before the runs", "With the correlation of groups")  # its tables
TARGETS = {"arithmetic": 0.85, "arithmetic-mixed": 0.7}  # accuracy on held-out problems
RULES = {"zero": "nonzero", "adaptive": "adaptive"}  # their names in METHODS
RATIOS = (0.1, 0.3, 1.0, 3.0)  # m, or rest: the time of all but training over that of training
GROUP_SIZES = (2, 4, 8, 16, 32)
TUNING_SEEDS = (100, 101)  # of three learning rates; all other seeds are fresh

Runs = dict[tuple, dict[int, float]]  # {(rule, m, group size): {fresh seed: time to the target}}


def law_runs() -> dict[str, Runs]:
    """The runs of each task."""
    rows = log.read_rows(LAW)
    return {task: times_of_arms([row for row in rows if row["task"] == task]) for task in TARGETS}


def times_of_arms(rows: list[dict]) -> Runs:
    """The times of every arm of a task, at the learning rate that is the fastest on the tuning
    seeds."""
    runs = {}
    for rule, m, size in itertools.product(RULES, RATIOS, GROUP_SIZES):
        arm = (rule, m if rule == "adaptive" else 0.0, size)
        of_rates = {}  # {learning rate: {seed: time}}
        for row in rows:
            if (row["rule"], row["ratio"], row["group_size"]) == arm:
                of_rates.setdefault(row["lr"], {})[row["seed"]] = time_to_target(row, m)
        tuned = lambda times: slowness(times[seed] for seed in TUNING_SEEDS)
        best = min(of_rates.values(), key=tuned)
        fresh = best.keys() - {*TUNING_SEEDS}
        runs[rule, m, size] = {seed: best[seed] for seed in sorted(fresh)}
    return runs


def time_to_target(row: dict, m: float) -> float:
    """Virtual time until the run's accuracy, made monotone, is at the target; else infinite."""
    target = TARGETS[row["task"]]
    times = [m * sampled + trained for _step, sampled, trained, _accuracy in row["curve"]]
    heights = monotone([point[3] for point in row["curve"]])
    for i in range(1, len(times)):
        if heights[i] >= target:
            share = (target - heights[i - 1]) / (heights[i] - heights[i - 1])
            return times[i - 1] + share * (times[i] - times[i - 1])
    return math.inf


def monotone(values: list[float]) -> list[float]:
    """The increasing sequence that is nearest by squares (pool adjacent violators)."""
    pools = []  # [mean, count]
    for value in values:
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (first, n), (second, k) = pools[-2:]
            pools[-2:] = [[(first * n + second * k) / (n + k), n + k]]
    return [mean for mean, count in pools for _ in range(count)]


def slowness(times) -> tuple[int, float]:
    """How many runs never arrived, and the median time: an order of arms."""
    times = [*times]
    return sum(map(math.isinf, times)), statistics.median(times)


def best_size(runs: Runs, rule: str, m: float) -> int:
    """The fastest group size."""
    return min(GROUP_SIZES, key=lambda size: slowness(runs[rule, m, size].values()))


def progress(runs: Runs, rule: str, m: float, size: int) -> dict[int, float]:
    """{seed: the time of the best group size without pruning over the arm's own}; 0 if that run
    never arrived."""
    best = runs["zero", m, best_size(runs, "zero", m)]
    return {seed: best[seed] / time for seed, time in runs[rule, m, size].items()}


def predictions(title: str, task: str) -> dict[tuple, list[float]]:
    """{(m, rule): progress by group size}, of the table below a title of PREDICTED."""
    names = {"default": "arithmetic", "mixed": "arithmetic-mixed"}
    by_arm = {}
    for line in PREDICTED.read_text().split(f"## {title}")[1].split("\n## ")[0].splitlines():
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if names.get(name) == task:
            m, rule, *values = cells
            by_arm[float(m), rule] = [float(value) for value in values]
    return by_arm


def gains_table(runs: Runs, task: str) -> str:
    """Markdown: the best group sizes, and what the best adaptive gains over the best group size
    without pruning."""
    cells = []
    for m in RATIOS:
        sizes = [best_size(runs, rule, m) for rule in RULES]
        gain = interval(progress(runs, "adaptive", m, sizes[1]))
        predicted = [max(predictions(title, task)[m, "adaptive"]) for title in PREDICTIONS]
        shown = " and ".join(f"{value:.2f}" for value in predicted)
        cells.append([f"{m:g}", *map(str, sizes), show(gain, digits=2), shown])
    return as_markdown(
        ["rest", "best size without pruning", "with", "adaptive gains", "predicted"], cells
    )


def draw_law(runs: Runs, task: str):
    """Virtual time to the target over the group size, at two values of m, relative to the best
    group size without pruning. Lines are predicted, points measured, with 95 % intervals; an arm
    of which a run never arrived has no point."""
    figure, (panels,) = new_figure(1, 2, (7, 3.8))
    for panel, m in zip(panels, (0.1, 1.0), strict=True):
        for rule, name in RULES.items():
            title, color, marker = METHODS[name]
            for prediction, style in zip(PREDICTIONS, (":", "-"), strict=True):
                times = [1 / value for value in predictions(prediction, task)[m, rule]]
                panel.plot(GROUP_SIZES, times, style, color=color, lw=1.2)
            points = []  # (group size, time, below it, above it)
            for size in GROUP_SIZES:
                of_seeds = progress(runs, rule, m, size)
                if all(of_seeds.values()):
                    logs = {seed: -math.log(value) for seed, value in of_seeds.items()}
                    middle, half = interval(logs)
                    low, time, high = map(math.exp, (middle - half, middle, middle + half))
                    points.append((size, time, time - low, high - time))
            sizes, times, *bars = zip(*points, strict=True)
            style = {"color": color, "marker": marker, "ls": "", "capsize": 3}
            panel.errorbar(sizes, times, bars, label=title, **style)
        panel.set(title=f"rest = {m:g}", xscale="log", yscale="log", xlabel="group size")
        panel.set_xticks(GROUP_SIZES, map(str, GROUP_SIZES))
        panel.set_yticks([0.5, 0.7, 1, 1.5, 2, 3, 4], ["0.5", "0.7", "1", "1.5", "2", "3", "4"])
        panel.minorticks_off()
    panels[0].set_ylabel("time to the target")
    add_legend(figure, panels)
    return figure


# ---------------------------------------------------------------------------- rows


def settings_of(rows: list[dict]) -> list[str]:
    known = {row["setting"] for row in rows}
    return [name for name in TITLES if name in known]


def sizes_of(rows: list[dict], setting: str) -> list[float]:
    return sorted({size_of(row) for row in rows if row["setting"] == setting})


def size_of(row: dict) -> float:
    """The seconds of a run of race.jsonl, which ended after seconds; else the prompts of a step."""
    words = row["flags"].split()
    return row.get("budget") or int(words[words.index("--prompts-per-step") + 1])


def by_seed(rows: list[dict], setting: str, method: str, size: float) -> dict[int, dict]:
    """{seed: row} of the runs of a method, of some seconds or prompts of a step."""
    wanted = (setting, method, size)
    return {
        row["seed"]: row for row in rows if (row["setting"], row["method"], size_of(row)) == wanted
    }


def accuracies(runs: dict[int, dict]) -> dict[int, float]:
    return {seed: row["accuracy"] for seed, row in runs.items()}


def mean_of(runs: dict[int, dict], name: str) -> float:
    return statistics.mean(row[name] for row in runs.values())


def difference(first: dict[int, float], second: dict[int, float]) -> dict[int, float]:
    """{seed: first minus second} of the seeds that both have."""
    return {seed: first[seed] - second[seed] for seed in first if seed in second}


def interval(values: dict[int, float]) -> tuple[float, float]:
    """(mean, half of its 95 % interval by Student's t) over seeds; NaN where there are too few."""
    values = [*values.values()]
    if len(values) < 2:
        return values[0] if values else math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), error * T95[min(len(values) - 2, len(T95) - 1)]


def show(figures: tuple[float, float], sign: str = "", digits: int = 3) -> str:
    """mean ± half, as far as they are known."""
    mean, half = figures
    text = "" if math.isnan(mean) else f"{mean:{sign}.{digits}f}"
    return text if math.isnan(half) else f"{text} ± {half:.{digits}f}"


def as_markdown(head: list[str], cells: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


# ---------------------------------------------------------------------------- pictures


def new_figure(rows: int, columns: int, size: tuple[float, float], **shared):
    """(figure, panels [rows, columns])."""
    # Not pyplot, whose backend is the caller's. Here, because tables need no matplotlib.
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **shared)
    for panel in panels.flat:
        panel.grid(alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def add_legend(figure, panels) -> None:
    """The legend of the first panel, which is that of all, below them."""
    style = {"frameon": False, "loc": "outside lower center", "ncols": 2 * len(panels)}
    figure.legend(*panels[0].get_legend_handles_labels(), **style)
