"""Engines that sample in place of rollout.py's plain loop: compact.py, hf.py and vllm_engine.py.

They may import engines, runtime, dppo and rollout. models.py and eval.py choose the engine.
"""
