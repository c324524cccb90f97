"""The figures of the TPU's compiler: a run completes another's, and loops are multiplied."""

import json
import types

from experiments.benchmark import tpu_costs


def test_a_run_completes_the_figures_of_another_and_their_page(call, monkeypatch, tmp_path):
  figures = dict(hbm_bytes=3 * 2**30, flops=5e9, temporary_bytes=7 * 2**20)
  costs = lambda name, **_: {} if name == "gathers" else figures
  monkeypatch.setattr(tpu_costs, "use_compiler", lambda: None)
  monkeypatch.setattr(tpu_costs, "cost", costs)
  old = dict(length=64, is_causal=True, backward=False, name="skew", hbm_bytes=2**20, flops=0)
  (tmp_path / "tpu_costs.json").write_text(json.dumps(dict(rows=[old])))
  answer = call("benchmark.__main__", "tpu_costs", "--lengths=64,1024", f"--out={tmp_path}")
  assert answer.status == 0, answer.err
  rows = json.loads((tmp_path / "tpu_costs.json").read_text())["rows"]
  assert rows[0] == old and len(rows) == 2 * 2 * (9 + 7)  # two are slow to compile
  page = (tmp_path / "tpu_costs.md").read_text()
  assert page.count("| skew | 3,072 / 5.0 / 7 | - |\n| gathers | does not fit | - |") == 3
  assert page.count("| skew | 1 / 0.0 / 0 | - |") == 1


def test_one_pass_of_each_loop_is_multiplied(monkeypatch):
  """A call of 6 passes over heads and 2 over blocks; 10 MB of each sequence are outside."""
  sizes = []

  class Function:
    def lower(self, token, *_):
      sizes.append(token.shape[0])
      for passes in (6, 2, 6, 2):
        tpu_costs.jax.lax.fori_loop(0, passes, lambda _, x: x, 0)
      return self

    compile = lambda self: self
    cost_analysis = lambda self: {"bytes accessed": 10e6 * sizes[-1] + 5e6, "flops": 1}
    memory_analysis = lambda self: types.SimpleNamespace(temp_size_in_bytes=7)

  monkeypatch.setattr(tpu_costs, "chips", lambda _: tpu_costs.jax.devices())
  monkeypatch.setattr(tpu_costs.jax, "jit", lambda _: Function())
  found = tpu_costs.cost("chunked", 64, is_causal=False, backward=False)
  assert sizes == [8, 16]
  assert found == dict(hbm_bytes=80e6 + 6 * 2 * 5e6, flops=12, temporary_bytes=7)
