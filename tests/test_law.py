"""P^2 Law (related/law.py) against its equation, and what it predicts of the stored rows."""

import json

import pytest
import torch

from related import law


def test_the_equation():
    """Fails if a term, a sign of an exponent or a factor differs from the paper's form."""
    one = lambda value: torch.tensor([value], dtype=torch.float64)
    rows = {"size": one(2.0), "tokens": one(8.0), "rate": one(0.5), "whole": one(1.0)}
    constants = (3.0, 5.0, 0.1, 1.0, 1 / 3, -1.0, 2.0)  # N_C, D_C, E, alpha, beta, gamma, delta
    # (1/0.5)^-1 (1/2)^2 (3/2 + 5/8^(1/3) + 0.1)
    torch.testing.assert_close(
        law.predict(rows, constants), one(1 + 0.5 * 0.25 * (1.5 + 2.5 + 0.1))
    )


def test_the_stored_errors():
    """Catches a fit to what it then predicts, and a prediction of other rows."""
    stored = json.loads(law.ROWS.read_text())
    rows = [row for row in stored["rows"] if row["method"] == "2ssp"]
    assert law.error(rows, "step") == pytest.approx(stored["fits"][3]["mean_error"], rel=1e-3)
