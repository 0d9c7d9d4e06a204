"""
Text to calibrate a pruning on, and text to judge it by, without a model hub.

`python-docs` is Python's own reference, 0.4 MB of technical English that comes with Python.
Anything else is the name of a text file.
"""

from pathlib import Path
from pydoc_data.topics import topics

import torch

from runtime import InputError


def read(name: str, tokenizer, samples: int, length: int) -> torch.Tensor:
    """[2, samples, length] tokens: windows spread over the first nine tenths of a text, to
    calibrate on, and over its last tenth, held out."""
    if name == "python-docs":
        paragraphs = "\n\n".join(topics[key] for key in sorted(topics)).split("\n\n")
        text = "\n\n".join(dict.fromkeys(paragraphs))  # each once, so none is in both parts
    elif Path(name).is_file():
        text = Path(name).read_text(encoding="utf-8")
    else:
        raise InputError(f"--data {name}: neither python-docs nor a file")
    tokens = tokenizer(text)["input_ids"]
    parts = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]
    if len(parts[1]) < samples * length:
        problem = f"{samples} windows of {length} tokens do not fit: {len(parts[1])} are held out"
        raise InputError(f"--data {name}: {problem}")
    windows = []
    for part in parts:
        starts = [number * len(part) // samples for number in range(samples)]
        windows.append(torch.tensor([part[start : start + length] for start in starts]))
    return torch.stack(windows)
