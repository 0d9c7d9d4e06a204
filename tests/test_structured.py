"""Structured pruning (related/structured.py and what it imports) on random models of four blocks. A
model without a sub-layer must be the whole model in which that sub-layer adds nothing."""

import re
import sys

import pytest
import torch
import toy
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import config
import models
import rollout
from related import pruned, structured
from runtime import InputError
from tasks import arithmetic

TOKENIZER = AutoTokenizer.from_pretrained(arithmetic.BASE)
IDS = torch.randint(0, 256, (3, 7), generator=torch.Generator().manual_seed(1))
REMOVED = ["3.self_attn", "1.mlp", "0.self_attn", "1.self_attn", "2.mlp"]  # block 1, and others
BLOCKS = ["2.mlp", "0.self_attn", "2.self_attn", "0.mlp"]


def make(family="Qwen3", **changes):
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 64, "head_dim": 16,
        "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
        "initializer_range": 0.2, "max_position_embeddings": 512, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": TOKENIZER.eos_token_id,
    }  # fmt: skip
    made = getattr(transformers, f"{family}Config")(**shape | changes)
    model = AutoModelForCausalLM.from_config(made).eval()
    model.generation_config = GenerationConfig(eos_token_id=TOKENIZER.eos_token_id, pad_token_id=0)
    return model


def save(model, folder):
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids, use_cache=False).logits


def without(model, removed, ids=IDS):
    """Logits of the model in which these sub-layers add nothing."""
    with structured.without(model, removed):
        return logits(model, ids)


def nll(logits, ids=IDS):
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])
    return -logprobs.mean()


# ------------------------------------------------------------------------- removal


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("removed", [REMOVED, BLOCKS], ids=["sub-layers", "blocks"])
def test_removal_is_the_masked_model(family, removed, tmp_path):
    """After the folder was loaded and saved again. A block of which nothing is left is gone; where
    all else is left, the folder is a plain one. Catches blocks that are numbered wrongly, kinds of
    layers that stay as many, and tensors that stay."""
    pruned.register()
    model = make(family)
    smaller = pruned.rebuild(model, removed)
    gone = {name: structured.size(pruned.sublayer(model, name)) + 32 for name in removed}  # a norm
    assert structured.size(smaller) == structured.size(model) - sum(gone.values())
    kind = model.config.model_type
    assert smaller.config.model_type == (kind if removed == BLOCKS else f"pruned_{kind}")
    loaded, _ = models.load_policy(save(smaller, tmp_path / "once"), "cpu")
    again, _ = models.load_policy(save(loaded, tmp_path / "twice"), "cpu")
    layers = again.model.layers
    assert len(layers) == len(getattr(again.config, "layer_types", layers)) < 4
    assert torch.allclose(toy.plain_logits(again, IDS), without(model, removed), atol=1e-5)


def test_dead_neurons_change_nothing(tmp_path):
    """Neurons whose output is 0 score 0, and the model without them is the same function. So it is
    after stock transformers has loaded it. Catches a down projection that keeps other columns."""
    model = make("Llama")
    with torch.no_grad():
        for number, block in enumerate(model.model.layers):
            block.mlp.up_proj.weight[number : number + 10] = 0
    before = logits(model)
    scores = structured.neuron_scores(model, IDS)
    assert ((scores == 0).sum(dim=1) == 10).all()
    pruned.keep_neurons(model, scores.topk(54).indices.sort().values)
    loaded = AutoModelForCausalLM.from_pretrained(save(pruned.rebuild(model, []), tmp_path))
    assert loaded.config.intermediate_size == 54
    assert torch.allclose(logits(loaded), before, atol=1e-5)


def test_engines_sample_from_a_pruned_model(tmp_path):
    """On prompts of unequal lengths. Catches attentions that are not renumbered: the cache's
    first entry would stay empty, and the next tokens would take the wrong positions."""
    pruned.register()
    folder = save(pruned.rebuild(make(), REMOVED), tmp_path)
    loaded, tokenizer = models.load_policy(folder, "cpu")

    def sample(engine):
        cfg = config.Config(engine=engine, max_new_tokens=6)
        sampling = models.sampling(cfg, loaded, tokenizer, 9, batch_size=9)
        return rollout.sample(loaded, [[1, 2, 3], [4], [5, 6]], sampling, group_size=3, seed=5)

    ours, theirs = sample("loop"), sample("hf")
    inside = torch.arange(6) < ours.lengths[..., None]
    assert torch.equal(ours.completion_ids[inside], theirs.completion_ids[inside])
    assert torch.allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


# ------------------------------------------------------------------------- the choice


def test_scores_are_losses_without_a_block():
    """Catches a block that is off by one, and a block of which only one part is removed."""
    model = make()
    scores = structured.block_losses(model, IDS)
    assert len(scores) == 4
    for block, score in enumerate(scores):
        gone = without(model, [f"{block}.self_attn", f"{block}.mlp"])
        assert score.item() == pytest.approx(nll(gone).item(), rel=1e-4)


def test_the_blocks_with_the_lowest_scores_go(monkeypatch):
    model, scores = make(), torch.tensor([3.0, 1.0, 4.0, 2.0])
    monkeypatch.setattr(structured, "block_losses", lambda *_: scores)
    smaller = structured.prune(model, IDS, "depth", 0.6)
    removed = [f"{block}.{kind}" for block in (1, 3) for kind in pruned.NORMS]
    assert torch.allclose(logits(smaller), without(model, removed), atol=1e-5)


def test_two_stage():
    """The shares of both stages, by hand, add up to the sparsity; dead neurons go first, and
    attentions are chosen greedily, by the loss of the narrow model without all that are gone so
    far. Catches an exponent upside down, an alpha that multiplies, and attentions that are not
    taken off the neurons' share."""
    narrow = make(num_hidden_layers=8)
    for block in narrow.model.layers:
        block.mlp.up_proj.weight.data[:10] = 0
    before = structured.size(narrow.model.layers)
    removed = structured.two_stage(narrow, IDS, 0.5)
    after = structured.size(pruned.rebuild(narrow, removed).model.layers)
    assert after / before == pytest.approx(0.5, abs=0.02)
    assert all(block.mlp.up_proj.weight.any(dim=1).all() for block in narrow.model.layers)
    assert (len(removed), narrow.config.intermediate_size) == (3, 28)
    for count, name in enumerate(removed):
        gone = removed[:count]
        others = [f"{b}.self_attn" for b in range(8) if f"{b}.self_attn" not in gone]
        losses = {other: nll(without(narrow, [*gone, other], IDS[:1]), IDS[:1]) for other in others}
        assert name == min(losses, key=losses.get)


# ------------------------------------------------------------------------- recovery


def test_fit_is_the_best_map_of_its_rank():
    """Against the singular vectors of the fitted outputs, of ordinary least squares with the
    penalty as further rows. Catches the smallest directions instead of the largest, and a bias that
    forgets the inputs' mean."""
    torch.manual_seed(0)
    x = torch.randn(50, 6).double() @ torch.randn(6, 6).double() + 3
    y = x @ torch.randn(6, 6).double() + torch.randn(50, 6).double()
    bias, down, up = structured.fit(x, y, 2, ridge=0.1)
    centered = x - x.mean(0)
    penalty = 0.1 * centered.square().sum() / 6
    rows = torch.cat([centered, penalty.sqrt() * torch.eye(6).double()])
    least = torch.linalg.lstsq(rows, torch.cat([y - y.mean(0), torch.zeros(6, 6).double()]))
    directions = torch.linalg.svd(rows @ least.solution).Vh[:2]
    matrix = least.solution @ directions.T @ directions
    assert torch.allclose((up @ down).T, matrix)
    assert torch.allclose(bias, y.mean(0) - x.mean(0) @ matrix)


def test_stand_ins_are_fitted_behind_earlier_ones():
    """On average over tokens, each adds what its sub-layer would add behind the stand-ins before
    it, whatever the order of removal. Catches fits on the whole model's stream."""
    model = make()
    removed = ["2.mlp", "0.self_attn", "0.mlp"]
    smaller = pruned.rebuild(model, removed, 2, structured.recover(model, IDS, removed, 2))
    name_of = {pruned.sublayer(smaller, name): name for name in removed}
    seen = []

    def compare(stand_in, args, kwargs, output):
        name = name_of[stand_in]
        pair = output, pruned.sublayer(model, name)(*args, **kwargs)
        added, wanted = (each[0] if "attn" in name else each for each in pair)
        assert torch.allclose(added.mean(dim=(0, 1)), wanted.mean(dim=(0, 1)), atol=1e-5)
        seen.append(name)

    with pruned.hooked(name_of, compare, with_kwargs=True):
        logits(smaller)
    assert seen == ["0.self_attn", "0.mlp", "2.mlp"]


# ------------------------------------------------------------------------- the commands


def test_command(monkeypatch, tmp_path, capsys):
    """From a folder to a folder and figures, on a text in place of Python's reference. Nine tenths
    calibrate and one is held out; a paragraph counts once, so none is in both. Catches a perplexity
    on the calibration text, and an --out-dir that is written over."""
    text = "\n\n".join(map(str, range(900)))
    monkeypatch.setattr(structured, "topics", {"numbers": text, "two of them again": "0\n\n1"})
    monkeypatch.setattr(structured, "SAMPLES", 4)
    monkeypatch.setattr(structured, "LENGTH", 20)
    tokens = torch.tensor(TOKENIZER(text)["input_ids"])
    nine_tenths = len(tokens) * 9 // 10
    calibration, held_out = structured.windows(TOKENIZER)
    assert torch.equal(calibration[3], tokens[3 * nine_tenths // 4 :][:20])
    assert torch.equal(held_out[0], tokens[nine_tenths:][:20])
    model = make("Llama")
    options = {"model": save(model, tmp_path / "whole"), "out_dir": tmp_path / "half"}
    structured.main(**options, method="depth", sparsity=0.5)
    smaller = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    wanted = [nll(logits(each, held_out), held_out).exp().item() for each in (model, smaller)]
    *_, row = capsys.readouterr().out.splitlines()
    found = [float(value) for value in re.findall(r"\d[\d.e+]*", row)]
    assert found == pytest.approx(wanted, rel=1e-3)
    with pytest.raises(InputError, match=r"--out-dir .*half exists: give another"):
        structured.main(**options)


def test_training_a_pruned_model(policy_folder, tmp_path, monkeypatch):
    """train.py alone refuses the folder, in a line that names the way. That way trains it, with its
    stand-ins, and the checkpoint is such a folder again."""
    whole, _ = models.load_policy(policy_folder, "cpu")
    whole.set_attn_implementation("sdpa")
    monkeypatch.setattr(structured, "RANK", 2)
    smaller = structured.prune(whole, IDS, "depth", 0.5, recovery=True)
    folder = save(smaller, tmp_path / "smaller")
    monkeypatch.delitem(transformers.CONFIG_MAPPING._extra_content, "pruned_qwen3", raising=False)
    with pytest.raises(InputError, match="pruned_qwen3"):
        models.load_policy(folder, "cpu")
    flags = toy.flags(folder, str(tmp_path / "out"), steps=1, save_every=1)
    monkeypatch.setattr(sys, "argv", ["pruned.py", "toy", *flags])
    pruned.main()
    trained, _ = models.load_policy(str(tmp_path / "out" / "checkpoint"), "cpu")
    assert trained.config.removed_sublayers == smaller.config.removed_sublayers
    assert [*trained.config.removed_sublayers.values()] == [2, 2], "the rank of both stand-ins"
    before = smaller.state_dict()
    assert all(not torch.equal(before[name], value) for name, value in trained.state_dict().items())
