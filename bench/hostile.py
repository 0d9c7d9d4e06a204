"""Answers that are made to hang or crash the judge: `python -m bench hostile`."""

import concurrent.futures
import itertools
import json
import resource
import time

import rewards
from bench import JsonFile, write_json
from runtime import math_judge

POWERS = [
    (base, height) for base in ("10", "9", "99", "2", "x", "1.5") for height in (3, 4, 5, 9, 40)
]


def main(json_file: JsonFile = None) -> None:
    """Score every hostile completion, from the main thread and from another, and report the cost.

    Args:
        json_file: where to write the rows {completion, gold, thread, reward, seconds} and a summary
    """
    rows = []
    rewards.math_reward("\\boxed{\\frac{1}{2}}", "0.5")  # start the judge outside the timing
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for thread, (completion, gold) in itertools.product((False, True), hostile_answers()):
            math_judge.ask.cache_clear()
            started = time.perf_counter()
            if thread:
                reward = pool.submit(rewards.math_reward, completion, gold).result()
            else:
                reward = rewards.math_reward(completion, gold)
            row = {
                "completion": completion[:60],
                "gold": gold,
                "thread": thread,
                "reward": reward,
                "seconds": time.perf_counter() - started,
            }
            rows.append(row)
    alive = rewards.math_reward("\\boxed{\\frac{2}{4}}", "0.5") == 1.0
    math_judge.stop()  # then the peak memory of its children is known
    seconds = [row["seconds"] for row in rows]
    summary = {
        "answers": len(rows),
        "not 0": sum(row["reward"] != 0 for row in rows),
        "slowest_s": max(seconds),
        "above_2_s": sum(spent > 2 for spent in seconds),
        "peak_gib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20,
        "judge_works": alive,
    }
    print(json.dumps(summary))
    write_json(json_file, {"summary": summary, "rows": rows})


def hostile_answers() -> list[tuple[str, str]]:
    """108 pairs (completion, gold) that try to hang or crash the judge, or to fill its memory.

    All of them are wrong.
    """
    answers = [
        *(tower(base, height) for base, height in POWERS),
        *(f"{n}!" for n in (10**5, 10**6, 10**8, 10**20)),
        *("3" + "!" * n for n in (3, 5, 9, 30)),
        *(f"\\{name}{{10^{{10^{{10}}}}}}" for name in ("sqrt", "sin", "log", "cos", "ln", "exp")),
        *(f"\\frac{{{tower('7', n)}}}{{{tower('5', n)}}}" for n in (4, 6)),
        *("-" * n + "2" for n in (500, 1900)),
        *(
            f"\\{name}_{{i=1}}^{{10^{{{n}}}}} i^{{i}}"
            for name in ("sum", "prod")
            for n in (6, 12, 100)
        ),
        *(f"\\binom{{10^{{{n}}}}}{{10^{{{n - 1}}}}}" for n in (5, 9, 20)),
        *(f"\\int_0^{{{n}}} e^{{x^{{x^x}}}} \\sin(x^{n}) dx" for n in (1, 7)),
        *(
            nested(opening, n)
            for opening in ("\\sqrt{", "\\frac{1}{1+", "{", "\\text{")
            for n in (50, 150)
        ),
        *("(" * n + "2" + ")" * n for n in (100, 900)),
        *("|" * n + "2" + "|" * n for n in (100, 900)),
        "x=" + tower("10", 4),
        "x>" + tower("10", 4),
        f"({tower('10', 4)}, \\infty)",
        f"\\{{1, {tower('9', 4)}\\}}",
        "9" * 1900,
        "0." + "1" * 1900,
        "1," * 900,
        "+".join("abcdefgh" * 100),
        "x^" * 900 + "2",
        "1/" * 900 + "0",
        "(x+1)^{10^5}",
        "(a+b+c+d+e)^{300}",
        "10^{-10^{10^{10}}}",
        "0^{0^{0}}",
        "1/0",
        "\\infty",
        "\\text{nan}",
        "\\begin{pmatrix}" + " \\\\ ".join([" & ".join("9" * 20)] * 20) + "\\end{pmatrix}",
        *("", " ", "\0", "\\", "}"),
        *("\ud7ff" * 900, "٣", "³", "\\boxed{}"),
        *("import os", "__import__('os').abort()", "lambda: 0", "%" * 900),
    ]
    texts = [
        *(f"\\boxed{{{answer}}}" for answer in answers),
        "\\boxed{" + "{" * 10**7,
        "\\boxed{" * 10**6,
        "}" * 10**7,
        "\\boxed{" + "{" * 10**7 + "}" * 10**7 + "}",
        "<think>" * 10**6 + "\\boxed{7}",
        "\\boxed{" + "7" * 10**7 + "}",
    ]
    golds = ("7", "\\frac{1}{7}", "x^{7}+1", "(1, 7)")
    return [(text, golds[number % len(golds)]) for number, text in enumerate(texts)]


def tower(base: str, height: int) -> str:
    """base^{base^{...}}"""
    return "^{".join([base] * height) + "}" * (height - 1)


def nested(opening: str, depth: int) -> str:
    """\\sqrt{\\sqrt{... 2 ...}}"""
    return opening * depth + "2" + "}" * depth
