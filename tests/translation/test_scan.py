"""SCAN: upstream's files become the corpus. `test_upstream` checks downloads."""

from experiments.translation import corpus
from experiments.translation.corpus import load_scan


def test_commands_and_actions_come_from_a_folder(tmp_path, publish, monkeypatch):
  monkeypatch.setattr(corpus, "_SCAN_HELD_OUT", 2)
  pairs = [(f"run {number}", " ".join(["I_RUN"] * number)) for number in range(1, 10)]
  lines = [f"IN: {command} OUT: {actions}\n" for command, actions in pairs]
  (tmp_path / "scan").mkdir()
  for name, of in dict(train=lines[:7], test=lines[7:]).items():
    (tmp_path / "scan" / f"tasks_{name}_length.txt").write_text("".join(of))
  publish(corpus, "SCAN", tmp_path / "scan")
  splits = load_scan(str(tmp_path / "scan")).splits
  assert {split: len(of) for split, of in splits.items()} == dict(
    train=3, valid=2, within=2, test=2
  )
  held_out = [pair for split in ("train", "valid", "within") for pair in splits[split]]
  assert sorted(held_out) == pairs[:7] != held_out and sorted(splits["test"]) == pairs[7:]
