"""The race: which flags, seeds and problems it has, and its table and picture."""

import itertools
import math
import statistics
from pathlib import Path

import pytest

import config
from bench import race, timed, tune
from bench.timed import Run
from runtime import InputError, log

PAGES = (Path("README.md"), Path("docs/race.md"))


def raced(tmp_path, **options):
    race.main(json_file=tmp_path / "race.jsonl", **options)
    return log.read_rows(tmp_path / "race.jsonl")


def mean(rows, flags):
    return statistics.mean(row["accuracy"] for row in rows if row["flags"] == flags)


def test_the_race(fake_runs, tmp_path, monkeypatch, capsys):
    """The better winner is raced at a budget between two.

    Catches the worse one, a race on seeds or problems of the search, more seeds for a method, and
    methods that do not take turns.
    """
    found = lambda setting, method, one: [f"{method} --lr 1", f"{method} --lr 5"][: 1 + (one > 9)]
    monkeypatch.setattr(tune, "winners", found)
    rows = raced(tmp_path, methods="pps,grpo,grpo-32x16", budgets=(5, 20, 80))
    contests = [run for run in fake_runs if run.search]
    assert [run.seed for run in contests] == 2 * sorted([100, 101, 102, 103] * 4)
    assert [run.budget for run in contests] == [20] * 16 + [40] * 16, "80 s were not searched"
    assert {run.method for run in contests} == {"pps", "grpo"}
    made = [run for run in fake_runs if not run.search]
    assert [run.seed for run in made[:7]] == [10, 10, 10, 11, 11, 11, 12]
    assert [run.method for run in made] == ["pps", "grpo", "grpo-32x16"] * (10 + 5 + 5)
    assert [run.budget for run in made] == [5] * 30 + [20] * 15 + [80] * 15
    assert len({run.flags.split()[-1] for run in made if run.budget == 20}) == 3, "1, 5, and none"
    for name, (budget, limit) in itertools.product(("pps", "grpo"), ((20, 20), (80, 40))):
        own = [row for row in rows if row["search"] and row["method"] == name]
        own = [row for row in own if row["budget"] == limit]
        best = max(own, key=lambda row: mean(own, row["flags"]))["flags"]
        assert {run.flags for run in made if (run.method, run.budget) == (name, budget)} == {best}
    count = len(fake_runs)
    said = capsys.readouterr().out
    raced(tmp_path, methods="pps,grpo", budgets=(5, 20, 80), table=True)
    assert capsys.readouterr().out.strip() in said
    raced(tmp_path, methods="pps,grpo", budgets=(5, 20, 80))
    assert len(fake_runs) == count, "finished runs are not repeated"
    monkeypatch.setattr(race, "ROWS", tmp_path / "race.jsonl")
    other = {"methods": "pps,grpo", "budgets": (20,), "json_file": tmp_path / "other.jsonl"}
    race.main(**other)
    again = [run.flags for run in fake_runs[count:] if not run.search]
    assert again == [run.flags for run in made if run.method != "grpo-32x16" and run.budget == 20]
    assert len(again) == len(fake_runs) - count, "a contest that was held is not repeated"


def test_a_contest_counts_the_trials_of_the_search():
    """Catches flags that won four runs of a contest although one of six in the search failed, and
    rows of other methods, budgets, flags or of the race."""
    runs = [Run("arithmetic", "grpo", flags, 40, 100, search=True) for flags in ("a", "b")]
    row = vars(runs[0]) | {"accuracy": 0.99}
    rows = [row] * 4 + [row | {"flags": "b", "accuracy": 0.98}] * 4
    assert race.best_of(runs, rows) == "a"
    failed = row | {"accuracy": 0.1}
    assert race.best_of(runs, [*rows, *[row] * 5, failed]) == "b"
    others = {"method": "pps", "budget": 10, "flags": "c", "search": False, "setting": "words"}
    for name, value in others.items():
        assert race.best_of(runs, [*rows, failed | {name: value}]) == "a", name


def test_borrowed_flags(fake_runs, tmp_path, monkeypatch):
    """A rule without a search has all flags but the method of the one that it borrows from, and
    --method grpo has its own. Catches rivals with train.py's defaults, which are pps's, and a
    contest of their own."""
    found = lambda _setting, name, _budget: {
        "grpo": ["--method grpo_zero --lr 1", "--method grpo_zero --lr 3"],
        "pps": ["--method pps --lr 2", "--method pps --lr 7"],
    }[name]
    monkeypatch.setattr(tune, "winners", found)
    borrowers = {"pps": "uniform", "grpo": "greso,dynamic,mopps,dppo_floor"}
    methods = ",".join([*borrowers, *borrowers.values(), "grpo-32x16"])
    raced(tmp_path, methods=methods, budgets=(20,), seeds=1)
    assert {run.method for run in fake_runs if run.search} == {"pps", "grpo"}
    flags = {run.method: run.flags for run in fake_runs if not run.search}
    assert {*flags} == {*methods.split(",")}
    for owner, names in borrowers.items():
        for name in names.split(","):
            rates = [flags[one].split("--lr ")[1] for one in (owner, name)]
            assert rates[0] == rates[1]
            assert config.parse_config(flags[name].split()).method == name
    flags = f"{timed.SETTINGS['arithmetic'].flags} {flags['grpo-32x16']}".split()
    cfg = config.resolve(config.parse_config(flags))
    assert (cfg.method, cfg.prompts_per_step, cfg.group_size, cfg.lr) == ("grpo", 32, 16, 6e-4)
    assert (cfg.loss, cfg.adam_beta2, cfg.lr_schedule) == ("grpo", 0.999, "linear")
    assert {*tune.SPACES, *race.BORROWED, *race.FIXED} == {*race.METHODS}


def test_a_failed_run_of_a_race(fake_runs, tmp_path, monkeypatch):
    """Catches a table in which a run that could not go on has the accuracy 0."""
    real = timed.train_for
    monkeypatch.setattr(timed, "train_for", lambda run: real(run) | {"failed": "the loss is nan"})
    with pytest.raises(InputError, match="arithmetic, --method grpo --prompts-per-step 32 "):
        raced(tmp_path, methods="grpo-32x16", budgets=(5,))


def test_a_missing_search_is_reported_first(fake_runs, tmp_path, monkeypatch):
    """Catches a race that finds out after its first setting."""
    tune.main("grpo,pps", ("arithmetic",), 2, tmp_path / "tune.jsonl")
    fake_runs.clear()
    monkeypatch.setattr(tune.winners, "__defaults__", (tmp_path / "tune.jsonl",))
    with pytest.raises(InputError, match="no whole search at 20 s"):
        raced(tmp_path, settings=("arithmetic", "arithmetic-mixed"), budgets=(20,))
    assert fake_runs == []


def rows_of(method, accuracy, one=10, flags="", setting="arithmetic", search=False):
    return [
        {"setting": setting, "method": method, "flags": flags, "budget": one, "seed": seed,
         "search": search, "accuracy": value}
        for seed, value in enumerate(accuracy)
    ]  # fmt: skip


def test_the_table():
    """By hand: pps 0.7, 0.8, 0.9 and GRPO 0.5, 0.7, 0.6, differences 0.2, 0.1, 0.3.

    Catches unpaired differences, normal quantiles, runs of a search, of flags that are no longer
    raced and of another setting, a comparison with half of the time in place of twice, and one
    with a method that has no rows.
    """
    rows = rows_of("pps", (0.1,) * 9, flags="--lr 1")
    rows += rows_of("pps", (0.7, 0.8, 0.9)) + rows_of("grpo", (0.5, 0.7, 0.6))
    rows += rows_of("pps", (0.0,) * 9, search=True)
    rows += rows_of("pps", (0.0,) * 9, setting="arithmetic-mixed")
    rows += rows_of("grpo", (0.65, 0.95), one=20) + rows_of("pods", (0.7, 0.7, 0.7))
    table = race.as_table(rows, "arithmetic").splitlines()
    cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in table}
    assert cells["seconds"] == ["10", "20"]
    half = 4.30 * 0.1 / math.sqrt(3)
    assert cells["pps"][0] == f"0.800 ± {half:.3f}"
    assert cells["GRPO, tuned"] == [f"0.600 ± {half:.3f}", "0.800 ± 1.906"]
    assert cells["pps - GRPO"][0] == f"+0.200 ± {half:.3f}"
    assert cells["pps - GRPO at twice"][0] == f"-0.050 ± {12.71 * 0.1:.3f}"
    assert cells["pps - PODS"] == [f"+0.100 ± {half:.3f}"]
    assert not {"CPPO, tuned", "pps - CPPO"} & {*cells}


def test_committed_tables():
    """README's rows and the tables of docs/race.md are those that --table prints. Catches a figure
    that outlived the rows that it came from."""
    rows, readme, page = log.read_rows(race.ROWS), *map(Path.read_text, PAGES)
    for setting in ("arithmetic", "arithmetic-mixed"):
        assert race.as_table(rows, setting) in page
    table = race.as_table(rows, "arithmetic").splitlines()
    names = ("| pps | 0", "| GRPO, tuned", "| PODS", "| CPPO")
    shown = [line for line in readme.splitlines() if line.startswith(names)]
    assert len(shown) == 4
    assert {*shown} <= {*table}


def test_the_picture(tmp_path):
    """A panel for each setting that has rows, a line for each method that has, at the mean with its
    interval. Catches accuracies of other flags, and budgets at the wrong place."""
    rows = rows_of("pps", (0.7, 0.8, 0.9)) + rows_of("pps", (0.9, 1.0), one=20)
    rows += rows_of("grpo", (0.5,)) + rows_of("grpo", (0.6, 0.8), setting="words", one=240)
    figure = race.draw(rows)
    first, second = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["arithmetic", "words"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["pps", "GRPO, tuned"]
    (pps, bars, _), (grpo, *_) = (line.lines for line in first.containers)
    assert [*pps.get_xdata()] == [10, 20]
    assert [*pps.get_ydata()] == pytest.approx([0.8, 0.95])
    half = 4.30 * 0.1 / math.sqrt(3)
    assert bars[1].get_ydata()[0] == pytest.approx(0.8 + half)
    assert [*grpo.get_ydata()] == [0.5]
    assert [label.get_text() for label in second.get_xticklabels()] == ["240"]
    log.write_rows(file := tmp_path / "rows.jsonl", rows)
    race.main(table=True, json_file=file)
    assert (tmp_path / "rows.png").exists()


def test_interval_is_students():
    """Of ten and of three values; none for one. Catches a degree of freedom too many."""
    values = dict(enumerate([1.0, 2.0, 3.0]))
    assert race.interval(values) == pytest.approx((2.0, 4.30 / math.sqrt(3)))
    ten = dict(enumerate([0.0, 2.0] * 5))
    assert race.interval(ten) == pytest.approx((1.0, 2.26 * math.sqrt(10 / 9) / math.sqrt(10)))
    assert race.interval({0: 0.5})[0] == 0.5
    assert math.isnan(race.interval({0: 0.5})[1])
    assert all(map(math.isnan, race.interval({})))


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (race, {"methods": "pps,grop"}, "--methods grop: choose from pps, grpo"),
        (race, {"table": True}, "--table: .*rows.jsonl has no rows; race first"),
        (
            race,
            {"settings": ("words",), "methods": "pps,grpo-32x16"},
            "--methods grpo-32x16: its flags are not for --settings words",
        ),
        (race, {"settings": ("gsm8k",)}, "--settings gsm8k: choose from arithmetic, arithm"),
        (tune, {"methods": "greso"}, "--methods greso: choose from grpo, pps, dppo"),
        (tune, {"settings": ("words",)}, "--settings words: there is no .*; run bash runs/smollm2"),
        (race, {"settings": ("words",)}, "--settings words: there is no .*; run bash runs/smollm2"),
    ],
)
def test_names_are_checked_first(command, options, message, tmp_path, monkeypatch):
    """Catches a race that fails hours later."""
    missing = tmp_path / "sft"
    monkeypatch.setattr(timed, "SFT", tmp_path if "methods" in options else missing)
    with pytest.raises(InputError, match=message):
        command.main(json_file=tmp_path / "rows.jsonl", **options)
    assert not list(tmp_path.iterdir())
