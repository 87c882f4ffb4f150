"""Reading a compiled program: small texts, numbers worked by hand."""
# ruff: noqa: E501 - lines of programs are long

import pytest

from jaxrl.forecast import program

LOOP = """HloModule loop
%fused (p0: bf16[4,8,16], p1: s32[]) -> bf16[8,16] {
  %p0 = bf16[4,8,16]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = bf16[1,8,16]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,8,16}
  ROOT %flat = bf16[8,16]{1,0} bitcast(%cut)
}

%body (arg: (s32[], bf16[4,8,16], bf16[32,16])) -> (s32[], bf16[4,8,16], bf16[32,16]) {
  %arg = (s32[]{:T(128)}, bf16[4,8,16]{2,1,0:T(8,128)(2,1)}, bf16[32,16]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %w = bf16[4,8,16]{2,1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=1
  %one = bf16[8,16]{1,0} fusion(%w, %i), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"100"}
  %all = bf16[32,16]{1,0} all-gather(%one), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %next = (s32[], bf16[4,8,16], bf16[32,16]) tuple(%i, %w, %all)
}

%until (arg: (s32[], bf16[4,8,16], bf16[32,16])) -> pred[] {
  %arg = (s32[], bf16[4,8,16], bf16[32,16]) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %n = s32[] constant(4)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (w: bf16[4,8,16], x: f32[5,16]) -> f32[5,32] {
  %w = bf16[4,8,16]{2,1,0} parameter(0)
  %x = f32[5,16]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %room = bf16[32,16]{1,0} broadcast(%zero), dimensions={}
  %start = (s32[], bf16[4,8,16], bf16[32,16]) tuple(%zero, %w, %room)
  %loop = (s32[], bf16[4,8,16], bf16[32,16]) while(%start), condition=%until, body=%body
  %all = bf16[32,16]{1,0} get-tuple-element(%loop), index=2
  %wide = f32[32,16]{1,0:T(8,128)S(1)} convert(%all), backend_config={"estimated_cycles":"9223372036854775807"}
  ROOT %y = f32[5,32]{1,0} dot(%x, %wide), lhs_contracting_dims={1}, rhs_contracting_dims={1}, backend_config={"estimated_cycles":"7"}
}
"""


def test_loops_count_as_often_as_they_turn():
    found = program.count(LOOP)
    assert found.cycles == 4 * 100 + 7  # what is unknown is left out
    assert found.flops == 2 * 5 * 32 * 16
    assert found.by_kind() == {"all-gather": {"count": 4, "bytes": 4 * 32 * 16 * 2}}
    assert found.collectives[0].groups == ((0, 1, 2, 3),)
    assert found.unknown_trips == 0


def test_hbm_counts_slices_and_leaves_out_what_lies_in_vmem():
    one = 8 * 16 * 2  # a slice of the weights
    turn = (one + 4 + one) + (one + 4 * one)  # the fusion: slice, index, result; the gather
    room = 32 * 16 * 2 + 4
    convert = 32 * 16 * 2  # read; written to VMEM
    dot = 5 * 16 * 4 + 5 * 32 * 4  # the other operand lies in VMEM
    assert program.count(LOOP).hbm_bytes == 4 * turn + room + convert + dot


def test_a_known_trip_count_wins_and_an_unknown_one_is_told():
    known = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"9"}}')
    assert program.count(known).by_kind()["all-gather"]["count"] == 9
    endless = program.count(LOOP.replace("direction=LT", "direction=NE"))
    assert (endless.unknown_trips, endless.by_kind()["all-gather"]["count"]) == (1, 1)


def test_two_turns_taken_together_are_one():
    pair = LOOP.replace(
        "  ROOT %next = (s32[], bf16[4,8,16], bf16[32,16]) tuple(%i, %w, %all)",
        "  %two = s32[] constant(2)\n  %more = s32[] add(%i, %two)\n"
        "  ROOT %next = (s32[], bf16[4,8,16], bf16[32,16]) tuple(%more, %w, %all)",
    )
    assert program.count(pair).by_kind()["all-gather"]["count"] == 2


def in_entry(*lines: str) -> program.Counted:
    body = "\n".join(f"  {line}" for line in lines)
    return program.count(f"ENTRY %main (x: f32[8,4]) -> f32[8,4] {{\n{body}\n}}\n")


X = "%x = f32[8,4]{1,0} parameter(0)"


@pytest.mark.parametrize(
    ("line", "kind", "size"),
    [
        ("f32[8,4] all-reduce(%x), channel_id=1", "all-reduce", 128),
        ("(f32[8,4], f32[8]) all-reduce(%x, %x), channel_id=1", "all-reduce", 160),
        ("f32[2,4] reduce-scatter(%x), channel_id=1", "reduce-scatter", 32),
        ("(f32[8,4], f32[32,4]) all-gather-start(%x), channel_id=1", "all-gather", 512),
        ("(f32[8,4], f32[2,4]) reduce-scatter-start(%x), channel_id=1", "reduce-scatter", 32),
        ("f32[8,4] all-reduce-start(%x), channel_id=1", "all-reduce", 128),
        (
            "(f32[8,4], f32[8,4], u32[]) collective-permute-start(%x), channel_id=1",
            "collective-permute",
            128,
        ),
    ],
)
def test_bytes_are_those_of_the_result(line, kind, size):
    found = in_entry(X, f"ROOT %y = {line}, replica_groups={{{{0,1,2,3}}}}")
    assert found.by_kind() == {kind: {"count": 1, "bytes": size}}


def test_a_collective_spread_over_several_fusions_counts_once():
    text = """%begin (p: f32[2,4]) -> f32[8,4] {
  %p = f32[2,4]{1,0} parameter(0)
  ROOT %g = f32[8,4]{1,0} all-gather(%p), channel_id=3, replica_groups={{0,1,2,3}}
}

%end (p: f32[2,4]) -> f32[8,4] {
  %p = f32[2,4]{1,0} parameter(0)
  ROOT %g = f32[8,4]{1,0} all-gather(%p), channel_id=3, replica_groups={{0,1,2,3}}
}

ENTRY %main (x: f32[2,4]) -> f32[8,4] {
  %x = f32[2,4]{1,0} parameter(0)
  %a = f32[8,4]{1,0} fusion(%x), kind=kCustom, calls=%begin
  ROOT %b = f32[8,4]{1,0} fusion(%x), kind=kCustom, calls=%end
}
"""
    assert program.count(text).by_kind() == {"all-gather": {"count": 1, "bytes": 128}}


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("dimensions={0}", ()),
    ],
)
def test_who_exchanges_with_whom(written, groups):
    assert program.groups_of(f", channel_id=1, {written}, use_global_device_ids=true") == groups


def test_a_matrix_product_written_as_a_convolution():
    # [8,4] x [4,16]: every output is a sum over 4 products.
    line = "%y = f32[8,16]{1,0} convolution(%x, %w), dim_labels=bf_io->bf"
    found = in_entry(X, "%w = f32[4,16]{1,0} parameter(1)", line)
    assert found.flops == 2 * 8 * 16 * 4
    # A batch of 3 products written as a dilated window: of 3 kernel places one meets an element.
    x = "%x = f32[3,8,4]{2,1,0} parameter(0)"
    w = "%w = f32[3,4,16]{2,1,0} parameter(1)"
    line = (
        "%y = f32[3,8,16]{2,1,0} convolution(%x, %w), window={size=3 stride=2 pad=0_0 lhs_dilate=3}"
        ", dim_labels=0bf_0io->0bf"
    )
    assert in_entry(x, w, line).flops == 2 * 3 * 8 * 16 * 4


def test_an_update_in_place_moves_the_update():
    text = """%fused (p0: f32[64,4], p1: f32[1,4], p2: s32[]) -> f32[64,4] {
  %p0 = f32[64,4]{1,0} parameter(0)
  %p1 = f32[1,4]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %u = f32[64,4]{1,0} dynamic-update-slice(%p0, %p1, %p2, %z)
}

ENTRY %main (x: f32[64,4], y: f32[1,4], i: s32[]) -> f32[64,4] {
  %x = f32[64,4]{1,0} parameter(0)
  %y = f32[1,4]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %u = f32[64,4]{1,0} fusion(%x, %y, %i), kind=kLoop, calls=%fused
}
"""
    assert program.count(text).hbm_bytes == 16 + 16 + 4  # read, written, index


def test_a_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        program.count("HloModule nothing\n")
