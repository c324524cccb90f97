"""What chips send each other, read in a compiled program."""

import pytest

from experiments.planning.collectives import ACROSS, Collective, by_kind, find, num_loops

TEXT = """HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%async_computation (p: bf16[64]) -> bf16[8] {
  ROOT %rs = bf16[8]{0:T(8)} reduce-scatter(%p), replica_groups=[1,8]<=[8], to_apply=%add
}

%body (carry: (s32[], f32[16])) -> (s32[], f32[16]) {
  %of_a_part = f32[16]{0} all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}

%cond (carry: (s32[], f32[16])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[100]) -> f32[100] {
  %both = (f32[2,8]{1,0:T(8,128)}, bf16[4]{0}) all-reduce(%a, %b), to_apply=%add
  %started = f32[10]{0} all-reduce-start(%a), replica_groups=[2,4]<=[8], to_apply=%add
  %done = f32[10]{0} all-reduce-done(%started)
  %gather = (f32[5]{0}, f32[40]{0}) all-gather-start(%c), replica_groups=[1,8]<=[8], dimensions={0}
  %gathered = f32[40]{0} all-gather-done(%gather)
  %rs-start = ((bf16[64]{0}), bf16[8]{0}) async-start(%d), calls=%async_computation
  %shift = (f32[6]{0}, f32[6]{0}, u32[], u32[]) collective-permute-start(%e), source_target_pairs={{0,1}}
  %loop = (s32[], f32[16]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %read = f32[9]{0} fusion(%both, %all-reduce.7), kind=kLoop, calls=%add
}
"""  # noqa: E501


def test_each_collective_counts_once_with_its_bytes_and_its_chips():
  assert find(TEXT, 8) == [
    Collective("reduce-scatter", 2 * 64, 8, 1),
    Collective("all-reduce", 4 * 16, 4, 3),
    Collective("all-reduce", 4 * 16 + 2 * 4, 8, 1),
    Collective("all-reduce", 4 * 10, 4, 1),
    Collective("all-gather", 4 * 40, 8, 1),
    Collective("collective-permute", 4 * 6, 8, 1),
  ]
  assert num_loops(TEXT) == 1


def test_kinds_are_summed_over_the_passes_of_loops():
  rows = by_kind(find(TEXT, 8))
  assert rows["all-reduce"]["times"] == 3 + 1 + 1
  assert rows["all-reduce"]["num_bytes"] == 3 * 64 + 72 + 40
  assert rows["all-reduce"]["sent_bytes"] == pytest.approx(2 * (3 * 48 + 63 + 30))


OVER_SLICES = """HloModule jit_step, is_scheduled=true

%all-reduce-scatter.3 (input_0: f32[1000,128]) -> f32[256,128] {
  %all-reduce.67 = f32[1024,128]{1,0:T(8,128)} all-reduce(%pad.32), channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true, to_apply=%add
  ROOT %part = f32[256,128]{1,0:T(8,128)} dynamic-slice(%all-reduce.67, %i, %zero)
}

ENTRY %main (a: f32[100]) -> f32[100] {
  %rs = f32[256,128]{1,0:T(8,128)} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.3
  %key = token[] after-all(), frontend_attributes={MegascaleRendezvousKeyName="all-reduce.40_0"}
  %send.8 = (f32[256,128]{1,0:T(8,128)}, u32[], token[]) send(%rs, %key), channel_id=18, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %sent = token[] send-done(%send.8), channel_id=18, frontend_attributes={_xla_megascale_target="{1,2}x{0:3}"}
  %ag = f32[1024,128]{1,0} all-gather(%recv), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}
  %of_all = f32[8]{0} all-reduce(%b), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}, to_apply=%add
  %of_a_part = f32[8]{0} all-reduce(%c), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1':(2)2}, to_apply=%add
}
"""  # noqa: E501


def test_a_sum_over_slices_goes_over_two_networks():
  """Scattered within a slice, summed across slices in parts, and gathered."""
  whole = 4 * 1024 * 128
  assert find(OVER_SLICES, 8)[:3] == [
    Collective("reduce-scatter", whole, 4, 1),
    Collective(ACROSS, whole // 4, 2, 1),
    Collective("all-gather", whole, 4, 1),
  ]


def test_groups_are_named_by_axes_of_a_mesh():
  assert [each.num_chips for each in find(OVER_SLICES, 8)[3:]] == [8, 4]


@pytest.mark.parametrize(
  "kind, sent",
  [
    ("all-reduce", 2 * 700),  # a reduce-scatter, and an all-gather
    ("all-gather", 700),
    ("reduce-scatter", 700),
    ("all-to-all", 700),
    ("collective-permute", 800),
    (ACROSS, 2 * 700),
  ],
)
def test_a_ring_sends_every_part_but_ones_own(kind, sent):
  assert Collective(kind, 800, num_chips=8, times=1).sent_bytes == sent


def test_a_program_of_one_chip_sends_nothing():
  assert (
    by_kind(find("ENTRY %main (a: f32[]) -> f32[] {\n  ROOT %b = f32[] add(%a, %a)\n}", 1)) == {}
  )
