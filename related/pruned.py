"""
Language models that lack some sub-layers, as related/structured.py writes them.

No config of transformers says "block 7 has no attention". So such a folder names an architecture
that transformers does not have, pruned_llama, pruned_qwen2 or pruned_qwen3, and refuses to load
until `register` was called. Its config.json holds `removed_sublayers`, the name of each
("7.self_attn" or "9.mlp", by block) with what stands in its place: null for nothing, r for a bias
and a matrix of rank r.

    python -m related.pruned PROGRAM FLAGS    train, eval or tasks.sft, able to load such a folder
    torchrun -m related.pruned train FLAGS    the same on several ranks
"""

import contextlib
import runpy
import sys

import torch
import transformers
from torch import nn

NORMS = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}  # of a block's input


def sublayer(model, name: str) -> nn.Module:
    """The one that is named by its block and its kind, such as "7.self_attn"."""
    return model.base_model.get_submodule(f"layers.{name}")


@contextlib.contextmanager
def hooked(modules, hook, **options):
    """Meanwhile each of these modules has this forward hook."""
    handles = [module.register_forward_hook(hook, **options) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class StandIn(nn.Module):
    """What a removed sub-layer leaves: bias + up(down(x)) for its normed input x [N, T, d]."""

    def __init__(self, width: int, rank: int | None, is_attention: bool):
        super().__init__()
        self.is_attention = is_attention
        self.rank = rank
        if rank:
            self.bias = nn.Parameter(torch.zeros(width))
            self.down = nn.Linear(width, rank, bias=False)
            self.up = nn.Linear(rank, width, bias=False)

    def forward(self, hidden_states, **_of_attention):
        update = self.bias + self.up(self.down(hidden_states)) if self.rank else 0.0
        return (update, None) if self.is_attention else update


def remove(model, removed: dict[str, int | None]) -> None:
    """Replace each named sub-layer, and the norm of its input where nothing reads it.

    The attentions that are left are renumbered: transformers asks the first entry of the
    key-value cache how many tokens it holds, and an attention that is gone would never fill it."""
    layers = model.base_model.layers
    for name, rank in removed.items():
        number, kind = name.split(".")
        block = layers[int(number)]
        setattr(block, kind, StandIn(model.config.hidden_size, rank, kind == "self_attn"))
        if rank is None:
            setattr(block, NORMS[kind], nn.Identity())
    left = [layer.self_attn for layer in layers if not isinstance(layer.self_attn, StandIn)]
    for place, attention in enumerate(left):
        attention.layer_idx = place


def _family(name: str):
    """(config class, model class) of pruned_*, for one architecture of transformers."""
    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM")
    fields = {"model_type": f"pruned_{config_class.model_type}", "__module__": __name__}
    config_class = type(f"Pruned{name}Config", (config_class,), fields)

    def init(self, config):
        model_class.__init__(self, config)
        remove(self, config.removed_sublayers)

    fields = {"config_class": config_class, "__init__": init, "__module__": __name__}
    return config_class, type(f"Pruned{name}ForCausalLM", (model_class,), fields)


FAMILIES = {name.lower(): _family(name) for name in ("Llama", "Qwen2", "Qwen3")}


def register() -> None:
    """Let transformers' Auto classes load and make these models."""
    for config_class, model_class in FAMILIES.values():
        transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        transformers.AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)


def keep_neurons(model, kept) -> None:
    """Narrow every FFN, in place, to the neurons kept [L, fewer n]."""
    for block, neurons in zip(model.base_model.layers, kept.to(model.device), strict=True):
        mlp = block.mlp
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight.data = linear.weight.data[neurons]
            linear.out_features = len(neurons)
        mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, neurons].contiguous()
        mlp.down_proj.in_features = mlp.intermediate_size = len(neurons)
    model.config.intermediate_size = kept.shape[1]


def rebuild(model, removed: list[str], rank: int | None = None, tensors: dict | None = None):
    """A new model without the removed sub-layers, in evaluation mode.

    rank: of what stands in their places; its `tensors` have the names of the state_dict of a model
    that has all blocks. With None, empty blocks are removed, and the others are renumbered."""
    blocks = [*range(len(model.base_model.layers))]  # those that are left
    if rank is None:
        blocks = [b for b in blocks if any(f"{b}.{kind}" not in removed for kind in NORMS)]
    stand_ins = {
        f"{place}.{kind}": rank
        for place, block in enumerate(blocks)
        for kind in NORMS
        if f"{block}.{kind}" in removed
    }
    config = model.config.to_dict() | {"num_hidden_layers": len(blocks)}
    del config["model_type"]  # the class below knows it
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][block] for block in blocks]
    config_class, model_class = type(model.config), type(model)
    if stand_ins:
        config_class, model_class = FAMILIES[model.config.model_type]
        config["removed_sublayers"] = stand_ins
    smaller = model_class(config_class.from_dict(config))
    smaller.generation_config = model.generation_config

    old, state = model.state_dict() | (tensors or {}), {}
    for name in smaller.state_dict():
        path = name.split(".")
        if path[1] == "layers":  # model.layers.PLACE.mlp.up_proj.weight
            path[2] = str(blocks[int(path[2])])
        state[name] = old[".".join(path)]
    smaller.load_state_dict(state)
    return smaller.eval()


def main() -> None:
    """Run another program of this repository, with its flags, after `register`."""
    register()
    del sys.argv[0]  # PROGRAM is first now, as if it had been run itself
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
