"""Measures how far apart phi, the scorer's outputs, must lie for `foresightkv`'s draw. Run as a script.

    cd tests && OMP_NUM_THREADS=1 python -m support.foresight_draw spread tiny qwen3-4b --inputs scaled raw >> FILE
    cd tests && OMP_NUM_THREADS=1 python -m support.foresight_draw loss shipped=FILE raw=FILE >> FILE

`spread` trains scorers on the built-in model or on a random model with the head width and the group of a real one, and
tells how far apart phi lies in the pool, and what the draw makes of it at other margins. `loss` multiplies the outputs
of trained scorers for the built-in model by several factors, and tells what the draw loses on `chain`. Both print CSV.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from kvbench import registry, tiny
from kvbench.engine.model.load import LoadedModel, load, prepare
from kvbench.engine.model.weights import Base
from kvbench.eviction.terms.foresight import drop_scores
from kvbench.replay.figures import jackknife
from kvbench.runner.bench.shapes import SHAPES
from kvbench.train.catalogue import entry_of
from kvbench.train.collection import Collection
from kvbench.train.foresight_scorer import TrainedScorer
from kvbench.train.foresight_states import Choice, Evictions
from kvbench.train.loop import train
from kvbench.train.recipe import Settings
from kvbench.train.recipes.foresightkv import ForesightRecipe
from kvbench.train.traces import Trace, built_in, collect

Scorer = Mapping[str, torch.Tensor]
MARGINS = (0.01, 0.1, 1.0, 2.0, 5.0, 20.0)
FACTORS = (0.002, 0.02, 0.1, 0.2, 0.5, 1.0, 4.0)  # times a margin of 5: 0.01 to 20
RELEASED_START = 0.02  # standard deviation of the initial tensors in the released code
WORDS = 160  # of the random models: few, so that a word and its key return


class Released(ForesightRecipe):
    """The recipe with raw inputs and outputs and the initial tensors of the released code."""

    def begin(self) -> None:
        super().begin()
        scaled, draws = self.trained, torch.Generator().manual_seed(self.settings.seed)
        start = {n: RELEASED_START * torch.randn(p.shape, generator=draws) for n, p in scaled.parameters.items()}
        self.trained = TrainedScorer(start, torch.zeros_like(scaled.mean), torch.ones_like(scaled.deviation))


def times(scorer: Scorer, factor: float) -> dict[str, torch.Tensor]:
    """Return the scorer whose phi is `factor` times as large."""
    return {name: t * factor if name in ("w2", "b2") else t for name, t in scorer.items()}


def pool_figures(scorer: Scorer, choices: Iterable[Choice], size: float = 2, seed: int = 0) -> dict[str, float]:
    """Return figures of the draw, means over evictions, layers and heads.

    size: the pool has `size` * n entries, those of largest phi; n of them are drawn. spread: standard deviation of phi
    over the pool; perplexity: of softmax(phi) over the pool, as a share of the pool; worst: which share of the n drawn
    is among the n of largest phi.
    """
    draws, figures = torch.Generator().manual_seed(seed), []
    for choice in choices:
        phi = drop_scores(scorer, choice.layer, choice.x)  # [b, Hk, competing]
        n = int(choice.dropped[0, 0].sum())
        pool = phi.topk(min(int(size * n), phi.shape[-1]), dim=-1).values.double()  # [b, Hk, size n], largest first
        entropy = torch.special.entr(pool.softmax(dim=-1)).sum(dim=-1)
        noise = -torch.empty_like(pool).exponential_(generator=draws).log()  # Gumbel
        drawn = (pool + noise).topk(n, dim=-1).indices
        each = (pool.std(dim=-1), entropy.exp() / pool.shape[-1], (drawn < n).double().mean(dim=-1))
        figures.append(torch.stack([figure.mean() for figure in each]))
    return dict(zip(("spread", "perplexity", "worst"), torch.stack(figures).mean(dim=0).tolist()))


def random_model(name: str) -> LoadedModel:
    """Return a model of two layers with random weights and two KV heads, of the width and group of a real shape."""
    family, real = SHAPES[name]
    group = real["num_attention_heads"] // real["num_key_value_heads"]
    small = {"vocab_size": WORDS, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"head_dim": 128, "num_attention_heads": 2 * group, "num_key_value_heads": 2}
    config = getattr(transformers, f"{family}Config")(**real | small | heads, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():  # logits of attention with a deviation near 3: far from uniform, as in trained models
        for key, parameter in model.named_parameters():
            if "q_norm" in key or "k_norm" in key:
                parameter.mul_(3**0.5)
            elif parameter.ndim > 1:
                parameter.mul_(2.0)
    return prepare(model, None)


def random_traces(count: int, prompt: int, answer: int, seed: int) -> list[Trace]:
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (count, prompt + answer), generator=draws).tolist()
    return [
        Trace(name=f"{seed}-{i}", prompt=tuple(row[:prompt]), answer=tuple(row[prompt:])) for i, row in enumerate(ids)
    ]


def material(name: str, args: argparse.Namespace) -> tuple[LoadedModel, list[Trace], list[Trace], dict[str, Any]]:
    """Return a model, its traces to train on and to test with, and the recipe's settings."""
    entry = entry_of("foresightkv")
    if name == "tiny":
        loaded = load(str(tiny.path()), device="cpu")
        asked = (built_in(entry.tasks, n, 0, loaded, held_out=h) for n, h in ((args.samples, False), (8, True)))
        return loaded, *(collect(loaded, questions) for questions in asked), entry.settings(name)
    prompt, answer = args.budget, 1 + 4 * args.interval
    sizes = {"budget": args.budget, "interval": args.interval}
    traces = [random_traces(count, prompt, answer, seed) for count, seed in ((args.samples, 1), (4, 2))]
    return random_model(name), *traces, entry.settings(name) | sizes


def spread(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    for name in args.models:
        loaded, traces, test, more = material(name, args)
        for inputs in args.inputs:
            scaled = inputs == "scaled"
            own = more | {"margin": 1.0 if scaled else 0.01}
            settings = Settings(steps=args.steps, lr=1e-2, batch=args.batch, more=own)
            recipe = (ForesightRecipe if scaled else Released)(loaded, settings, traces, test)
            with tempfile.TemporaryDirectory() as folder:
                done = train(recipe, Path(folder), base=Base(name=name, config=loaded.model.config))
            scorer = {key: tensor.detach() for key, tensor in recipe.trained.scorer().items()}
            if args.keep:
                save_file(scorer, f"{args.keep}/{name}-{inputs}.safetensors")
            choices = [choice for trace in recipe.test for choice in recipe.evictions.golden(trace).choices]
            about = {"model": name, "budget": own["budget"], "interval": own["interval"], "steps": args.steps}
            about |= {"inputs": inputs, "agreement": done.after["agreement"]}
            # With scaled inputs phi is proportional to the margin: the training at margin 1 serves all of them.
            for margin in MARGINS if scaled else (0.01,):
                phi = times(scorer, margin) if scaled else scorer
                yield about | {"margin": margin} | pool_figures(phi, choices)


def loss(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    loaded = load(str(tiny.path()), device="cpu")
    traces = collect(loaded, built_in(("chain",), args.samples, 0, loaded, held_out=True), Collection(wrong="keep"))
    sizes = {"budget": args.budget, "interval": args.interval, "longest": max(len(trace.ids) for trace in traces)}
    method = registry.methods.get("foresightkv")
    drawing, worst = (Evictions(loaded, method(sampling=draw, pool=args.pool), **sizes) for draw in (True, False))
    full = [drawing.full(trace).losses for trace in traces]

    def added(evictions: Evictions, scorer: Scorer, seeds: Sequence[int]) -> tuple[list[float], list[Choice]]:
        """Return the nats that eviction adds to each answer, a mean over its readings, and all choices."""
        readings = [evictions.drawn(trace, seeds, scorer) for trace in traces]
        nats = [float((r.losses - f).sum(dim=1).mean()) for r, f in zip(readings, full)]
        return nats, [choice for reading in readings for choice in reading.choices]

    for name, path in (scorer.split("=", 1) for scorer in args.scorers):
        scorer = load_file(path)
        base, _ = added(worst, scorer, [0])
        sums = {"worst": base, "tokens": [len(trace.answer) for trace in traces]}
        about = {
            "scorer": name,
            "budget": args.budget,
            "interval": args.interval,
            "pool": args.pool,
            "answers": len(traces),
            "draws": args.draws,
        }
        yield about | {"draws": 1, "factor": "no draw"} | _loss_figures(sums | {"nats": base})
        for factor in args.factors:
            phi = times(scorer, factor)
            nats, choices = added(drawing, phi, range(args.draws))
            yield (
                about
                | {"factor": factor}
                | pool_figures(phi, choices, args.pool)
                | _loss_figures(sums | {"nats": nats})
            )


def _loss_figures(sums: dict[str, Any]) -> dict[str, Any]:
    """Return loss per token and its difference to the scorer without the draw, with standard errors over answers."""
    answers = range(len(sums["tokens"]))
    found, error = jackknife(sums, answers, lambda s: s["nats"] / s["tokens"])
    more, its_error = jackknife(sums, answers, lambda s: (s["nats"] - s["worst"]) / s["tokens"])
    return {"loss": found, "loss_se": error, "against_no_draw": more, "against_se": its_error}


DRAW = "spread,perplexity,worst"
COLUMNS = {
    spread: f"model,budget,interval,inputs,steps,agreement,margin,{DRAW}",
    loss: f"scorer,budget,interval,pool,answers,draws,factor,{DRAW},loss,loss_se,against_no_draw,against_se",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("spread")
    one.add_argument("models", nargs="+")
    one.add_argument("--inputs", nargs="+", choices=("scaled", "raw"), default=["scaled", "raw"])
    one.add_argument("--budget", type=int, default=256, help="of random models")
    one.add_argument("--interval", type=int, default=64, help="of random models")
    one.add_argument("--samples", type=int, default=32)
    one.add_argument("--steps", type=int, default=200)
    one.add_argument("--batch", type=int, default=4)
    one.add_argument("--keep", help="folder for the scorers")
    one.set_defaults(measure=spread)
    two = commands.add_parser("loss")
    two.add_argument("scorers", nargs="+", metavar="NAME=FILE")
    two.add_argument("--factors", nargs="+", type=float, default=FACTORS)
    two.add_argument(
        "--pool", type=float, default=2.0, help="candidates per entry to be dropped, as the method's option"
    )
    two.add_argument("--samples", type=int, default=24)
    two.add_argument("--draws", type=int, default=4)
    two.add_argument("--budget", type=int, default=48)
    two.add_argument("--interval", type=int, default=32)
    two.set_defaults(measure=loss)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = csv.DictWriter(sys.stdout, COLUMNS[args.measure].split(","), lineterminator="\n")
    table.writeheader()
    for row in args.measure(args):
        table.writerow({key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()})
        sys.stdout.flush()


if __name__ == "__main__":
    main()
