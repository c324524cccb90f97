"""Holds an implementation of attention against the table of cases."""

import ast
import pathlib

import cases
import laws
import numpy as np
import papers
import pytest
import report

TOLERANCES = {"float64": 1e-10, "float32": 3e-5, "float16": 1e-2}
NAMES = [case.name for case in cases.CASES]
FOLDER = pathlib.Path(__file__).parent


def error_of(actual, wanted):
  """Returns the largest error, and the name of the array that has it.

  An error is divided by the largest expected number, or by 1 if that is larger. It is
  inf for NaN.
  """
  errors = {}
  for name, right in wanted.items():
    values = np.asarray(actual[name], np.float64)
    right = np.asarray(right, np.float64)
    if values.shape != right.shape:
      raise TypeError(f"{name} has shape {values.shape}, not {right.shape}")
    error = np.max(np.abs(values - right), initial=0)
    error = float(error / max(1.0, np.max(np.abs(right), initial=0)))
    errors[name] = float("inf") if np.isnan(error) else error
  worst = max(errors, key=errors.get)
  return errors[worst], worst


def with_all_gradients(attend):
  """Returns `attend`; a call raises an error unless it returns all gradients."""

  def call(arrays, options):
    results = attend(arrays, options)
    if not isinstance(results, tuple):
      raise TypeError(f"returns {type(results).__name__}; want (output, gradients)")
    output, gradients = results
    wanted = arrays.keys() - set(papers.FIXED)
    if gradients.keys() != wanted:
      names = ", ".join(sorted(gradients.keys() ^ wanted))
      raise KeyError(f"gradients are missing, or too many: {names}")
    return output, gradients

  return call


@pytest.mark.parametrize("case", cases.CASES, ids=NAMES)
def test_attention(case, attend, dtype, record_property):
  record_property("case", case.name)
  arrays = case.draw(dtype)

  try:
    actual, wanted = case.law(with_all_gradients(attend), arrays, case.options)
    error, name = error_of(actual, wanted)
  except NotImplementedError as refusal:
    record_property("verdict", "refused")
    record_property("how", str(refusal))
    pytest.skip(f"refused: {refusal}")
  except Exception as problem:
    record_property("verdict", "raises")
    record_property("how", f"{type(problem).__name__}: {problem}".splitlines()[0])
    raise

  tolerance = 0 if case.law in laws.EXACT else TOLERANCES[case.dtype or dtype]
  is_right = error <= tolerance
  record_property("verdict", "pass" if is_right else "wrong")
  record_property("error", error)
  part = name if name == "output" else f"gradient of {name}"
  assert is_right, f"error {error:.1e} in {part}; {case.symptom}? ({case.source})"


@pytest.mark.parametrize("case", cases.CASES, ids=NAMES)
def test_the_gradients_of_the_papers_are_central_differences(case):
  arrays = case.draw("float64")
  generator, step = np.random.default_rng(0), 1e-6
  moving = [x for x in arrays if arrays[x].dtype.kind == "f" and x not in papers.FIXED]
  direction = {name: generator.standard_normal(arrays[name].shape) for name in moving}

  _, gradients = papers.attention(arrays, case.options)

  totals = []
  for sign in (1, -1):
    moved = {name: arrays[name] + sign * step * direction[name] for name in moving}
    output, _ = papers.attention({**arrays, **moved}, case.options)
    totals.append((output * arrays["cotangent"]).sum())
  slope = sum((gradients[name] * direction[name]).sum() for name in moving)
  assert gradients.keys() == set(moving)
  scale = max(1.0, abs(slope))
  assert abs((totals[0] - totals[1]) / (2 * step) - slope) < 2e-6 * scale


def test_cases_have_distinct_names_sources_and_symptoms():
  assert len(set(NAMES)) == len(NAMES) >= 40
  assert all(case.source and case.symptom for case in cases.CASES)


def test_the_page_has_the_records():
  if not report.PAGE.exists():
    pytest.skip("the folder is alone")

  is_written = report.tables() in report.PAGE.read_text("utf-8")
  assert is_written, "run python tests/conformance/report.py"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("adapters/[!_]*.py")), ids=str)
def test_an_adapter_has_at_most_twenty_lines(file):
  functions = [
    node
    for node in ast.parse(file.read_text("utf-8")).body
    if isinstance(node, ast.FunctionDef)
  ]

  assert functions
  for function in functions:
    assert function.end_lineno - function.lineno < 20, function.name
