"""RunConfig: the grid, the hash, the way to JSON and back; and settings from files, environment and flags."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.request import build
from kvbench.config.layers import Given, gather, suites, unknown_variables
from kvbench.config.run_config import Cell, Grid, MethodChoice, RunConfig
from kvbench.console.problems import Problems
from kvbench.errors import KVBenchError, UserError


def grid(
    methods: str = "full,gkv", budgets: tuple[int, ...] = (64, 48), tasks: str = "walk", limit: int | None = None
) -> Grid:
    chosen = tuple(MethodChoice(name=name) for name in methods.split(","))
    return Grid(methods=chosen, budgets=budgets, tasks=tuple(tasks.split(",")), limit=limit)


def built(**flags: Any) -> RunConfig:
    """A configuration as the run command builds it from flags alone."""
    problems = Problems()
    config = build(gather(flags, {}, flags.pop("suite", None), flags.pop("config", None)), problems)
    problems.stop()
    assert config is not None
    return config


def test_grid_has_the_full_cache_once_per_task() -> None:
    cells = RunConfig(grids=(grid(tasks="walk,chain"),)).cells()
    assert [c.label for c in cells] == [
        "walk full", "walk gkv @64", "walk gkv @48", "chain full", "chain gkv @64", "chain gkv @48",
    ]  # fmt: skip


def test_overlapping_grids_run_a_cell_once() -> None:
    config = RunConfig(grids=(grid(), grid("gkv,tova", (48,))))
    assert len(config.cells()) == len(set(config.cells())) == 4
    assert config.tasks == ("walk",)
    assert [m.name for m in config.methods] == ["full", "gkv", "tova"]
    assert config.budgets == (48, 64)


def test_hash_depends_on_what_changes_rows_and_on_nothing_else() -> None:
    base = RunConfig(grids=(grid(),))
    same = [
        RunConfig(grids=(grid("gkv,full", (48, 64)),)),
        RunConfig(grids=(grid("full", ()), grid("gkv"))),
        dataclasses.replace(base, data="elsewhere"),
    ]
    other = [
        dataclasses.replace(base, seed=1),
        dataclasses.replace(base, limit=3),
        RunConfig(grids=(grid(limit=3),)),
        RunConfig(grids=(grid(budgets=(48,)),)),
        RunConfig(
            grids=(Grid(methods=(MethodChoice(name="gkv", options=(("window", 8),)),), tasks=("walk",), budgets=(48,)),)
        ),
    ]
    assert {c.hash() for c in same} == {base.hash()}
    assert len({c.hash() for c in other} | {base.hash()}) == 6


def test_hash_is_stable_between_processes_and_versions() -> None:
    """A changed hash makes every run folder another run: change it on purpose only."""
    assert RunConfig(grids=(grid(),)).hash() == "46cfb771094b96ee"


def test_shares_are_budgets_of_their_own() -> None:
    config = RunConfig(grids=(grid("gkv", (64, 0.25, 1, 1.0)),))
    assert [c.label for c in config.cells()] == ["walk gkv @64", "walk gkv @25%", "walk gkv @1", "walk gkv @100%"]
    assert [(b, type(b)) for b in config.budgets] == [(1, int), (64, int), (0.25, float), (1.0, float)]
    hashes = {RunConfig(grids=(grid("gkv", (b,)),)).hash() for b in (1, 1.0, 0.25, 0.5)}
    assert len(hashes) == 4
    again = RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert [type(b) for b in again.grids[0].budgets] == [int, float, int, float]
    assert config.to_dict()["grids"][0]["budgets"] == [64, "25%", 1, "100%"]
    with pytest.raises(UserError, match="'budget' 150% is above 100%"):
        RunConfig(grids=(grid("gkv", (1.5,)),))


def test_the_record_has_every_setting_that_decides_rows() -> None:
    base = RunConfig(grids=(grid(),), plugin=("a.py",))
    assert (base.stored()["prefill"], base.stored()["plugin"]) == ("full", None)
    other = dataclasses.replace(base, prefill="chunked", compress="query-agnostic")
    assert (other.stored()["prefill"], other.stored()["compress"]) == ("chunked", "query-agnostic")
    assert len({base.hash(), other.hash(), dataclasses.replace(base, prefill="chunked").hash()}) == 3
    assert dataclasses.replace(base, plugin=()).hash() == base.hash()
    assert RunConfig.from_dict(base.stored()) == dataclasses.replace(base, plugin=())


def test_json_round_trip() -> None:
    options = (("window", 8), ("form", "mean"), ("redundancy", False))
    config = RunConfig(
        grids=(grid(limit=5), Grid(methods=(MethodChoice(name="gkv", options=options),), budgets=(32,), tasks=("x",))),
        temperature=0.5, slots=4, thinking=False, seed=2**64 - 1,
    )  # fmt: skip
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.limit_for("walk") == 5
    assert config.limit_for("x") is None


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("seed", -1, "'seed' must be a whole number from 0"),
        ("interval", 0, "'interval' must be 1 or more; got 0."),
        ("interval", 3_000_000_000, "'interval' must be 2147483647 or less; got 3000000000."),
        ("temperature", float("nan"), "must be a finite number >= 0; got 'nan'."),
        ("limit", True, "must be a whole number, 1 or more; got 'True'."),
        ("limit", 3_000_000_000, "must be 1,000,000 or less; got 3000000000."),
        ("samples", "1000001", "must be 1,000,000 or less; got 1000001."),
        ("slots", "many", "or 'auto'; got 'many'."),
        ("dtype", "float8", "'float8': choose auto, float32"),
    ],
)
def test_values_are_checked_at_construction(setting: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        RunConfig(grids=(grid(),), **{setting: value})


def test_unknown_key_in_stored_settings() -> None:
    with pytest.raises(UserError, match=r"unknown key 'sed'\. Did you mean 'seed'"):
        RunConfig.from_dict({"grids": [], "sed": 1})


def test_two_limits_for_one_task_cannot_be_paired() -> None:
    with pytest.raises(UserError, match="task 'walk' has two values of 'limit': 3 and 4"):
        RunConfig(grids=(grid(limit=3), grid("tova", limit=4)))
    with pytest.raises(UserError, match="task 'walk' has two values of 'limit': 3 and none"):
        RunConfig(grids=(grid(limit=3), grid("tova")))


def test_cells_are_hashable_and_say_their_options() -> None:
    method = MethodChoice(name="snapkv-decode", options=(("window", 8), ("kernel", 5)))
    assert Cell(method=method, budget=64, task="walk").label == "walk snapkv-decode(kernel=5, window=8) @64"


# --- where values come from


def test_flag_beats_environment_beats_config_beats_suite(tmp_path: Path) -> None:
    suite, config = tmp_path / "s.toml", tmp_path / "c.toml"
    suite.write_text('seed = 1\ninterval = 7\nlimit = 9\ntop_k = 3\n[[grid]]\nmethod = "full"\ntask = "walk"\n')
    config.write_text("[run]\nseed = 2\ninterval = 8\nlimit = 10\n")
    gathered = gather({"seed": "4"}, {"KVBENCH_SEED": "3", "KVBENCH_INTERVAL": "5"}, str(suite), config)
    found = {key: given.value for key in ("seed", "interval", "limit", "top_k") if (given := gathered.first(key))}
    assert found == {"seed": "4", "interval": "5", "limit": 10, "top_k": 3}
    assert gathered.record()["seed"] == [
        {"source": "s.toml:1", "value": 1},
        {"source": "c.toml:2", "value": 2},
        {"source": "environment variable KVBENCH_SEED", "value": "3"},
        {"source": "--seed", "value": "4"},
    ]
    assert gathered.first("device") is None


def test_a_false_or_zero_flag_is_given() -> None:
    gathered = gather({"thinking": False, "top_k": "0", "limit": None, "method": []}, {})
    assert gathered.first("thinking") == Given(False, "--thinking")
    assert set(gathered.flags) == {"thinking", "top_k"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = 1\nbuget = 2\n", "c.toml:2: unknown key 'buget'. Did you mean 'budget'?"),
        ("[run]\n\n'sede' = 1\n", "c.toml:3: unknown key 'sede'. Did you mean 'seed'?"),
        ("[[grid]]\ntask='walk'\n[[grid]]\nlimits = 3\n", "c.toml:4: unknown key 'limits'. Did you mean 'limit'?"),
        ("seed = \n", "c.toml:1: not TOML"),
        ("run = 3\n", "c.toml: [run] must be a table of settings and [[grid]] a list of tables."),
        ("seed = 'x'\nmethod='full'\ntask='walk'\n", "c.toml:1: 'seed' must be a whole number from 0"),
        ("method='full'\ntask='walk'\nthinking = 3\n", "c.toml:3: 'thinking' must be true or false; got '3'."),
    ],
)
def test_mistakes_in_a_file_have_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(KVBenchError) as found:
        built(config=path)
    assert str(found.value).startswith(message)


def test_blocks_take_what_they_lack_from_the_run(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        'method = ["full", {name = "gkv", window = 8}]\n'
        '[[grid]]\ntask="walk"\nbudget=[48]\nlimit=2\n[[grid]]\ntask="chain"\nbudget=96\n'
    )
    config = built(config=path)
    assert [c.label for c in config.cells()] == [
        "walk full",
        "walk gkv(window=8) @48",
        "chain full",
        "chain gkv(window=8) @96",
    ]
    assert (config.limit_for("walk"), config.limit_for("chain")) == (2, None)
    assert built(config=path, limit="1").limit_for("walk") == 1


def test_an_option_goes_to_the_methods_of_all_blocks_that_have_it(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('task="walk"\nbudget=48\n[[grid]]\nmethod=["full","gkv"]\n[[grid]]\nmethod=["tova","rkv"]\n')
    config = built(config=path, method_opt=["form=local"])
    assert [m.label for m in config.methods] == ["full", "gkv(form=local)", "tova", "rkv"]
    with pytest.raises(KVBenchError, match="method 'rkv' has no option 'xyzzy'"):
        built(config=path, method_opt=["xyzzy=1"])


def test_a_block_words_the_questions_of_its_tasks(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('method = "full"\n[[grid]]\ntask="aime24"\nprompt_style="gkv"\n[[grid]]\ntask="walk"\n')
    config = built(config=path)
    assert (config.prompt_style_for("aime24"), config.prompt_style_for("walk")) == ("gkv", None)
    assert RunConfig.from_dict(config.to_dict()) == config
    assert config.hash() != built(method=["full"], task=["aime24", "walk"]).hash()
    plain = built(config=path, prompt_style="default")
    assert plain.prompt_style_for("aime24") == plain.prompt_style_for("walk") == "default"


def test_task_flag_selects_among_the_blocks_and_budget_flag_replaces() -> None:
    config = built(suite="demo", task=["chain"], budget=["100"])
    assert config.tasks == ("chain",)
    assert config.budgets == (100,)
    with pytest.raises(UserError, match=r"no \[\[grid\]\] of the file has task 'walk/orbit-100' \(--task\)"):
        built(suite="demo", task=["walk/orbit-100"])


def test_a_config_file_overrides_the_blocks_of_a_suite(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('task = ["chain"]\nbudget = 100\nlimit = 4\n')
    config = built(suite="demo", config=path)
    assert (config.tasks, config.budgets, config.limit_for("chain")) == (("chain",), (100,), 4)
    assert built(suite="demo", config=path, limit="1", budget=["64"]).budgets == (64,)
    path.write_text('budget = 100\n[[grid]]\ntask = "chain"\nmethod = "tova"\nbudget = 64\n')
    assert built(suite="demo", config=path).budgets == (64,)


def test_neither_a_file_nor_a_variable_switches_the_sandbox_off(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[run]\nunsafe_run_code = true\n")
    with pytest.raises(UserError, match=r"^c\.toml:2: 'unsafe_run_code' is refused in files"):
        built(config=path)
    environ = {"KVBENCH_UNSAFE_RUN_CODE": "1"}
    assert gather({}, environ).first("unsafe_run_code") is None
    [warning] = unknown_variables(environ)
    assert warning == "environment variable KVBENCH_UNSAFE_RUN_CODE has no effect; only the flag has."
    assert built(method=["full"], task=["walk"], unsafe_run_code=True).unsafe_run_code


def test_every_shipped_suite_is_a_valid_run() -> None:
    assert "demo" in suites()
    for name in suites():
        assert built(suite=name).cells()


def test_demo_compares_the_full_cache_with_seven_methods_or_more_at_two_budgets() -> None:
    config = built(suite="demo")
    assert {"walk", "chain", "lookup"} <= set(config.tasks)
    for task in config.tasks:
        cells = [c for c in config.cells() if c.task == task]
        assert len({c.method.name for c in cells if c.budget}) >= 7
        assert len({c.budget for c in cells if c.budget}) == 2
        assert any(c.budget is None for c in cells)


# --- method options


def test_an_option_goes_to_every_method_that_has_it_unless_it_is_named() -> None:
    common = {"method": ["full,gkv,snapkv-decode,knorm"], "budget": ["64"], "task": ["walk"]}
    everyone = built(**common, method_opt=["window=8"])
    assert {m.name for m in everyone.methods if m.options == (("window", 8),)} == {"gkv", "snapkv-decode"}
    one = built(**common, method_opt=["gkv.window=8"])
    assert {m.name for m in one.methods if m.options} == {"gkv"}
    with pytest.raises(UserError, match="--method-opt names method 'tova', but this run does not have the method"):
        built(**common, method_opt=["tova.window=8"])


def test_a_default_given_by_hand_is_the_default() -> None:
    common = {"method": ["gkv"], "budget": ["64"], "task": ["walk"]}
    assert built(**common, method_opt=["window=16"]).hash() == built(**common).hash()


def test_options_of_two_methods_name_theirs(tmp_path: Path) -> None:
    common = {"method": ["H2O+gkv,gkv"], "budget": ["25%"], "task": ["walk"]}
    assert [m.label for m in built(**common).methods] == ["h2o+gkv", "gkv"]
    named = built(**common, method_opt=["gkv.window=8"])
    assert [m.label for m in named.methods] == ["h2o+gkv(gkv.window=8)", "gkv(window=8)"]
    pair = built(**common, method_opt=["h2o+g-kv.window=8", "window=4"][:1])
    assert [m.label for m in pair.methods] == ["h2o+gkv(gkv.window=8)", "gkv"]
    everyone = built(**common | {"method": ["rkv+gkv"]}, method_opt=["window=8"])
    assert [m.options for m in everyone.methods] == [(("gkv.window", 8),)]  # 8 is what rkv has anyway
    path = tmp_path / "c.toml"
    path.write_text('task = "walk"\nbudget = "25%"\nmethod = [{name = "rkv+gkv", gkv.window = 8, "rkv.window" = 4}]\n')
    assert built(config=path).cells()[0].label == "walk rkv+gkv(gkv.window=8, rkv.window=4) @25%"
    path.write_text('task = "walk"\nbudget = 64\nmethod = [{name = "rkv+gkv", h2o.window = 8}]\n')
    with pytest.raises(UserError, match=r"option 'h2o.window' is for method 'h2o', which is not in 'rkv\+gkv'"):
        built(config=path)


def test_unknown_variables_are_told_with_what_was_meant() -> None:
    known = {
        "KVBENCH_SEED": "1",
        "KVBENCH_DATA": "x",
        "KVBENCH_NO_PROGRESS": "1",
        "KVBENCH_METHOD_OPT": "a=1",
        "SEED": "2",
    }
    assert unknown_variables(known) == []
    assert unknown_variables({"KVBENCH_SED": "3", "KVBENCH_XYZZY": "1"}) == [
        "environment variable KVBENCH_SED is not known and has no effect. Did you mean KVBENCH_SEED?",
        "environment variable KVBENCH_XYZZY is not known and has no effect.",
    ]
