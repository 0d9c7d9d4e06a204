"""Engines that sample in place of rollout.py's loop: hf.py and vllm_engine.py.
And memory.py, which plans what a run takes of a GPU's memory.

They may import engines, runtime, dppo, lora, packing and rollout. models.py and eval.py choose the
engine.
"""
