"""P^2 Law (related/law.py) against its equation, and the small runs that it is fitted to."""

import itertools
import json

import pytest
import torch

from bench import __main__ as command_line
from bench import law as bench
from related import law
from runtime import InputError

KNOWN = law.Law(N_C=0.3, D_C=0.5, E=0.1, alpha=0.7, beta=0.4, gamma=-1.2, delta=0.2)


def grid(constants):
    """Rows that follow the law exactly: 3 sizes, 3 rates, 5 token counts."""
    sizes, rates, tokens = [0.2, 0.6, 1.5], [0.25, 0.375, 0.5], [0.2, 0.4, 0.8, 1.6, 3.2]
    columns = zip(*itertools.product(sizes, rates, tokens), strict=True)
    size, rate, tokens = (torch.tensor(column, dtype=torch.float64) for column in columns)
    rows = law.Rows(size, tokens, rate, 0.3 / size, torch.zeros_like(size))
    return rows._replace(loss=constants.predict(rows))


def test_the_equation():
    """Fails if a term, a sign of an exponent or a factor differs from the paper's form."""
    one = lambda value: torch.tensor([value], dtype=torch.float64)
    rows = law.Rows(one(2.0), one(8.0), one(0.5), one(1.0), one(0.0))
    constants = law.Law(N_C=3.0, D_C=5.0, E=0.1, alpha=1.0, beta=1 / 3, gamma=-1.0, delta=2.0)
    # (1/0.5)^-1 (1/2)^2 (3/2 + 5/8^(1/3) + 0.1)
    torch.testing.assert_close(constants.predict(rows), one(1 + 0.5 * 0.25 * (1.5 + 2.5 + 0.1)))


@pytest.mark.parametrize("held_out", ["size", "rate", "tokens"])
def test_a_law_is_found_again(held_out):
    """Fails if the fit stops early, or reads rows that are held out."""
    rows = grid(KNOWN)
    column = getattr(rows, held_out)
    tested = column == column.max()
    spoiled = rows._replace(loss=torch.where(tested, torch.nan, rows.loss))
    found = law.fit(spoiled.where(~tested))
    excess = (rows.loss - rows.whole)[tested]
    off = (found.predict(rows)[tested] - rows.loss[tested]).abs()
    assert (off / excess).max() < 0.1


def test_the_fit_is_robust():
    """Fails if one loss that is far off bends the whole law, as it would with squares."""
    rows = grid(KNOWN)
    rows.loss[7] += 3.0
    found = law.fit(rows)
    off = (found.predict(rows) - rows.loss).abs()
    off[7] = 0.0
    assert off.max() < 0.01


def test_errors_by_hand():
    """Fails if a slope crosses from one run to another, or is not per doubling."""
    tokens = torch.tensor([4.0, 1.0, 1.0, 4.0], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    loss = torch.tensor([1.0, 3.0, 2.0, 2.5], dtype=torch.float64)
    rows = law.Rows(ones, tokens, ones, torch.zeros_like(ones), loss)
    flat = law.Law(N_C=1.0, D_C=0.0, E=1.0, alpha=1.0, beta=1.0, gamma=1.0, delta=1.0)  # 2 always
    found = law.errors(flat, rows, torch.tensor([0, 0, 1, 1]))
    assert found["mean_error"] == pytest.approx((1 + 1 + 0 + 0.5) / 4)
    # From 1 to 4 tokens are two doublings: run 0 falls by 1 each, run 1 rises by 0.25.
    assert found["asd"] == pytest.approx((1 + 0.25) / 2)
    spread = sum((one - 2.125) ** 2 for one in loss.tolist())
    assert found["r2"] == pytest.approx(1 - (1 + 1 + 0.25) / spread)


def test_the_bench(tmp_path, capsys, monkeypatch):
    """Fails if a row is missing, a finished run is repeated, or a holdout tests what it fitted."""
    monkeypatch.setattr(law, "STARTS", 4)
    monkeypatch.setattr(bench, "HELD_OUT", 16)
    path = tmp_path / "law.json"
    flags = "--widths 32 64 --rates 0.25 0.5 --methods l2 --base-steps 3 --steps 32"
    args = ["law", *flags.split()]
    command_line.main([*args, "--json", str(path)])
    stored = json.loads(path.read_text())
    rows = stored["rows"]
    assert [row["step"] for row in rows] == [1, 2, 4, 8, 16, 32] * 4
    for row, after in itertools.pairwise(rows):
        assert after["step"] == 1 or row["tokens"] < after["tokens"]
    assert len({row["whole"] for row in rows}) == 2  # one for each width
    assert len({row["pruned"] for row in rows}) == 4
    assert {row["width"]: row["size"] for row in rows}[64] > 40_000
    said = capsys.readouterr().out
    shown = {line.split()[1]: line.split()[2:4] for line in said.splitlines() if "l2   " in line}
    assert {name: shown[name] for name in bench.HOLDOUTS} == {
        "none": ["24", "24"], "size": ["12", "12"], "rate": ["12", "12"], "tokens": ["20", "4"]
    }  # fmt: skip
    command_line.main([*args, "--json", str(path)])
    assert json.loads(path.read_text()) == stored
    again = capsys.readouterr().out
    assert "width" not in again
    assert again.splitlines()[-1] == said.splitlines()[-1]


def test_what_is_held_out(monkeypatch):
    """Fails if a fit is tested on other rows than the largest size, highest rate or last tokens."""
    monkeypatch.setattr(law, "STARTS", 4)
    rows = [
        {"method": "l2", "width": width, "rate": rate, "step": step, "tokens": 1e4 * step,
         "size": 1e4 * width, "whole": 0.1, "loss": 0.2 + rate / step}
        for width, rate in ((32, 0.25), (32, 0.5), (64, 0.25)) for step in (1, 2, 4)
    ]  # fmt: skip
    found = {fit["held_out"]: (fit["fitted"], fit["tested"]) for fit in bench.table(rows)}
    assert found == {"none": (9, 9), "size": (6, 3), "rate": (6, 3), "tokens": (6, 3)}


@pytest.mark.parametrize(
    ("flags", "said"), [("--widths 48", "--widths 48"), ("--steps 31", "--steps 31")]
)
def test_bad_flags(flags, said):
    """Fails if a value that cannot work is found out only after minutes of training."""
    with pytest.raises(InputError, match=said):
        command_line.main(["law", *flags.split()])
