"""The embedded task's reward, as verl calls it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import data

score = data.reward_function("arithmetic")


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **options):
    return score(solution_str, ground_truth)
