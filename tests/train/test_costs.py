import jax
import jax.numpy as jnp
import pytest

from race_jax.train.costs import Traffic, read_costs
from race_jax.train.hlo import Shape, parse


def compiled(function, *shapes):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arrays).compile()


def costs_of(function, *shapes):
    return read_costs(compiled(function, *shapes).as_text())


def layers(x, weights):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def test_one_product():
    # Two per multiplication and addition: 2 * 5 * 32 * 48.
    assert costs_of(jnp.dot, (5, 32), (32, 48)).flops == 2 * 5 * 32 * 48


def test_batched_and_transposed_products():
    found = costs_of(lambda a, b: jnp.einsum("bkq,bks->bqs", a, b), (3, 16, 24), (3, 16, 40))
    assert found.flops == 2 * 3 * 16 * 24 * 40


def test_a_scan_counts_as_often_as_it_runs():
    one = 2 * 8 * 32 * 32
    program = compiled(layers, (8, 32), (7, 32, 32))
    assert read_costs(program.as_text()).flops == 7 * one
    # What the walk is for: XLA itself counts the body of the loop once.
    assert program.cost_analysis()["flops"] < 2 * one


def test_nested_loops_multiply():
    def outer(x, weights):
        return jax.lax.scan(lambda x, _: (layers(x, weights), None), x, None, length=5)[0]

    assert costs_of(outer, (8, 32), (7, 32, 32)).flops == 5 * 7 * 2 * 8 * 32 * 32


def training(x, weights):
    def loss(weights):
        body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None), prevent_cse=False)
        return jnp.sum(jax.lax.scan(body, x, weights)[0])

    return jax.grad(loss)(weights)


def test_a_checkpointed_gradient_is_four_products_and_keeps_the_inputs_of_layers():
    found = costs_of(training, (8, 32), (7, 32, 32))
    # Forward, again in the backward pass, and one product for each of the two inputs.
    assert found.flops == 4 * 7 * 2 * 8 * 32 * 32
    # The input of each layer, float32 [8, 32]; the gradient [7, 32, 32] is no activation.
    assert found.stacked == 7 * 8 * 32 * 4


def test_what_inner_passes_store_does_not_add_up():
    def twice(x, weights):
        # Each outer step makes a whole gradient; its stacks live no longer than the step.
        def step(total, x):
            return total + training(x, weights), None

        return jax.lax.scan(step, jnp.zeros_like(weights), x)[0]

    assert costs_of(twice, (5, 8, 32), (7, 32, 32)).stacked == 7 * 8 * 32 * 4


def test_a_forward_pass_keeps_nothing():
    assert costs_of(layers, (8, 32), (7, 32, 32)).stacked == 0


def test_a_loop_whose_length_is_data_counts_once_and_is_named():
    def program(x, weight, count):
        return jax.lax.fori_loop(0, count[0].astype(int), lambda _, x: jnp.tanh(x @ weight), x)

    found = costs_of(program, (8, 32), (32, 32), (1,))
    assert found.open_loops == 1 and found.flops == 2 * 8 * 32 * 32


def test_a_convolution_agrees_with_xla():
    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (2,), [(1, 2)], (3,), (2,), dimension_numbers=("NWC", "WIO", "NWC")
        )

    program = compiled(convolve, (2, 11, 8), (5, 8, 16))
    assert read_costs(program.as_text()).flops == program.cost_analysis()["flops"]


MODULE = """HloModule m, is_scheduled=true

%condition (p: (s32[], f32[4,8], s32[])) -> pred[] {
  %p = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)}, s32[]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=2
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%start.body (q: f32[4,8]) -> (f32[4,8], f32[16,8]) {
  %q = f32[4,8]{1,0} parameter(0)
  %gather.1 = f32[16,8]{1,0} all-gather(%q), channel_id=3, dimensions={0}
  ROOT %begun = (f32[4,8]{1,0}, f32[16,8]{1,0}) tuple(%q, %gather.1)
}

%beside (r: f32[4,8]) -> f32[4,8] {
  %r = f32[4,8]{1,0} parameter(0)
  %gather.2 = f32[16,8]{1,0} all-gather(%r), channel_id=3, dimensions={0}
  ROOT %same = f32[4,8]{1,0} copy(%r)
}

%body (t: (s32[], f32[4,8], s32[])) -> (s32[], f32[4,8], s32[]) {
  %t = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)}, s32[]) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%t), index=0
  %two = s32[] constant(2)
  %more = s32[] add(%j, %two)
  %x = f32[4,8]{1,0} get-tuple-element(%t), index=1
  %limit = s32[] get-tuple-element(%t), index=2
  %one = (f32[4,8]{1,0}, f32[16,8]{1,0}) fusion(%x), kind=kCustom, calls=%start.body
  %other = f32[4,8]{1,0} fusion(%x), kind=kOutput, calls=%beside
  %sent = (f32[4,8]{1,0}, f32[4,8]{1,0}, u32[]) collective-permute-start(%other), channel_id=4
  %there = f32[4,8]{1,0} collective-permute-done(%sent)
  ROOT %next = (s32[], f32[4,8]{1,0}, s32[]) tuple(%more, %there, %limit)
}

ENTRY %main (a: f32[4,8]) -> f32[16,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %zero = s32[] constant(1)
  %first = s32[]{:T(128)} copy(%zero)
  %last = s32[] constant(10)
  %all = (s32[], f32[4,8]{1,0}, s32[]) tuple(%first, %a, %last)
  %loop = (s32[], f32[4,8]{1,0}, s32[]) while(%all), condition=%condition, body=%body
  %y = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  %g = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%y), channel_id=5, dimensions={0}
  ROOT %done = f32[16,8]{1,0} all-gather-done(%g)
}
"""


def test_a_module_as_tpus_have_it():
    found = read_costs(MODULE)
    # From 1 below 10 in steps of 2: 1, 3, 5, 7, 9. The gather of channel 3 stands in the text of
    # two fused instructions and runs once each time; one more follows the loop.
    assert found.open_loops == 0
    assert found.collectives == {
        "all-gather": Traffic(5 + 1, (5 + 1) * 16 * 8 * 4),
        "collective-permute": Traffic(5, 5 * 4 * 8 * 4),
    }


def product(line, left, right):
    text = (
        f"ENTRY %e (a: {left}, b: {right}) -> f32[] {{\n"
        f"  %a = {left}{{0}} parameter(0)\n  %b = {right}{{0}} parameter(1)\n"
        f"  ROOT %c = {line}\n}}\n"
    )
    return read_costs(text).flops


def test_batched_products_written_as_convolutions_with_holes():
    # 8 products [128, 64] x [64, 32]: each output position meets one kernel position.
    line = (
        "f32[8,1,128,32]{3,2,1,0} convolution(%a, %b), window={size=8x1 stride=7x1 lhs_dilate=8x1},"
        " dim_labels=01bf_0oi1->01bf"
    )
    assert product(line, "bf16[8,1,128,64]", "bf16[8,32,64,1]") == 8 * 2 * 128 * 64 * 32
    # [16 x 10] x [10, 2 heads of 24]: the heads are output positions of a reversed kernel.
    line = (
        "f32[16,2,24]{2,1,0} convolution(%a, %b), window={size=2 pad=1_1 rhs_reversal=1},"
        " dim_labels=b0f_0io->b0f"
    )
    assert product(line, "bf16[16,1,10]", "bf16[2,10,24]") == 2 * 16 * 10 * 2 * 24


def test_grouped_products_and_kernels_that_state_their_costs():
    line = "f32[100,32]{1,0} ragged-dot(%a, %b, %a), lhs_contracting_dims={1}"
    assert product(line, "bf16[100,64]", "bf16[8,64,32]") == 2 * 100 * 64 * 32
    kernel = 'f32[4]{0} custom-call(%a, %b), custom_call_target="tpu_custom_call", backend_config='
    stated = kernel + '{"custom_call_config":{"cost_estimate":{"flops":"1200","bytes":"7"}}}'
    assert product(stated, "f32[4]", "f32[4]") == 1200
    silent = f"  %a = f32[4] parameter(0)\n  ROOT %attend.7 = {kernel}{{}}\n"
    text = f"ENTRY %e (a: f32[4]) -> f32[4] {{\n{silent}}}"
    assert read_costs(text.replace("%b", "%a")).opaque == {"attend": 1}


SPLASH = """ENTRY %e (q: bf16[4,1024,64], k: bf16[2,1024,64]) -> bf16[4,1024,64] {
  %q = bf16[4,1024,64]{2,1,0} parameter(0)
  %k = bf16[2,1024,64]{2,1,0} parameter(1)
  %mask = s8[1,2,2]{2,1,0} constant({...})
  ROOT %splash_mha_fwd_segmented.3 = bf16[4,1024,64]{2,1,0} custom-call(%mask, %q, %k, %k), \
custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="jit(f)"}
}
"""


def test_attention_kernels_count_as_the_causal_half_in_blocks():
    # Blocks of 512: of the 2 x 2, three are computed. Two products, 4 heads of width 64.
    found = read_costs(SPLASH)
    assert found.flops == 2 * 2 * 4 * 3 * 512 * 512 * 64 and not found.opaque
    # The gradient's two kernels have four and three products.
    for name, products in (("splash_mha_dkv", 4), ("splash_mha_dq", 3)):
        other = read_costs(SPLASH.replace("splash_mha_fwd", name))
        assert other.flops == products / 2 * found.flops


def test_sizes_of_arrays():
    assert Shape("bf16", (3, 5)).bytes == 30
    assert Shape("f32", ()).bytes == 4
    assert Shape("pred", (9,)).bytes == 9
    assert Shape("s4", (6,)).bytes == 3
    assert Shape("f8e4m3fn", (6,)).bytes == 6
    assert Shape("c64", (2,)).bytes == 16


def test_text_that_is_no_module():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("nothing here")
