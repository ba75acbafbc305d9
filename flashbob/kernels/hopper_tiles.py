"""Pieces that the Hopper kernels share: layouts, asynchronous products, rings of tiles, the order of the blocks.

Rules of the house, all found by reading what ptxas makes of it (a broken rule serializes every product):

- `scores`, `more_scores` and `product` only issue, one wgmma group each. Groups finish in order, so a result may be
  read after a `warpgroup_mma_wait(younger, ...)` that allows as many groups in flight as were issued after it. The
  same wait frees the register operands and the shared tiles of everything older.
- Left operands that serve the whole loop live in registers where they fit: a [64, 16] operand costs 2 KiB of shared
  memory bandwidth (128 bytes a cycle) at every use otherwise, as much as the products of 64 columns take.
- A warpgroup owns 64 stationary rows, and all layouts are those of one warpgroup.
- Zeros of an accumulator are pinned by a wait before the loop (`empty_accumulators`).
- A thread block synchronizes where Triton sees two accesses to one allocation, so each streamed operand has its own
  array of mbarriers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def accumulator_layout(columns):
    """Registers of a [64, columns] float32 accumulator, 16 rows a warp."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def operand_layout(columns):
    """Registers of a 16-bit left operand: those of an accumulator, packed in pairs."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator_layout(columns), k_width=2)


@gluon.constexpr_function
def tile_layout(columns):
    """Shared memory of a tile of 16-bit elements, as TMA writes it and wgmma reads it."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=2)


@gluon.jit
def scores(a, b):
    """Issue a b^T."""
    N: gl.constexpr = b.shape[0]
    zero = gl.zeros([64, N], gl.float32, accumulator_layout(N))
    return warpgroup_mma(a, b.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def more_scores(a, b, acc):
    """Issue acc + a b^T."""
    return warpgroup_mma(a, b.permute([1, 0]), acc, is_async=True)


@gluon.jit
def product(p, b, acc):
    """Issue acc + p b, with p in shared memory or in the registers of an operand."""
    return warpgroup_mma(p, b, acc, is_async=True)


@gluon.jit
def narrow(p, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Float32 scores as a 16-bit left operand; nothing moves between threads."""
    return gl.convert_layout(p.to(dtype), LAYOUT, assert_trivial=True)


@gluon.jit
def empty_accumulators(D: gl.constexpr, COUNT: gl.constexpr):
    zero = gl.zeros([64, D], gl.float32, accumulator_layout(D))
    if COUNT == 2:
        a, b = warpgroup_mma_wait(0, (zero, zero))
        return warpgroup_mma_init(a), warpgroup_mma_init(b)
    else:  # noqa: RET505 (Triton compiles what follows a constexpr return)
        a, b, c = warpgroup_mma_wait(0, (zero, zero, zero))
        return warpgroup_mma_init(a), warpgroup_mma_init(b), warpgroup_mma_init(c)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """COUNT mbarriers, each completed by one arrival (and the bytes it expects)."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def four_tiles(dtype: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr):
    T: gl.constexpr = tile_layout(D)
    return (
        gl.allocate_shared_memory(dtype, [ROWS, D], T),
        gl.allocate_shared_memory(dtype, [ROWS, D], T),
        gl.allocate_shared_memory(dtype, [ROWS, D], T),
        gl.allocate_shared_memory(dtype, [ROWS, D], T),
    )


@gluon.jit
def key_ring(dtype: gl.constexpr, STAGES: gl.constexpr, BN: gl.constexpr, D: gl.constexpr):
    """Shared memory of the streamed k, v, uk, uv."""
    T: gl.constexpr = tile_layout(D)
    return (
        gl.allocate_shared_memory(dtype, [STAGES, BN, D], T),
        gl.allocate_shared_memory(dtype, [STAGES, BN, D], T),
        gl.allocate_shared_memory(dtype, [STAGES, BN, D], T),
        gl.allocate_shared_memory(dtype, [STAGES, BN, D], T),
    )


@gluon.jit
def query_ring(dtype: gl.constexpr, STAGES: gl.constexpr, BM: gl.constexpr, D: gl.constexpr):
    """Shared memory of the streamed q, uq, do and their packed row scalars."""
    T: gl.constexpr = tile_layout(D)
    return (
        gl.allocate_shared_memory(dtype, [STAGES, BM, D], T),
        gl.allocate_shared_memory(dtype, [STAGES, BM, D], T),
        gl.allocate_shared_memory(dtype, [STAGES, BM, D], T),
        gl.allocate_shared_memory(gl.float32, [STAGES, 4 * BM], gl.NVMMASharedLayout(0, 32, rank=1)),
    )


@gluon.jit
def four_barriers(STAGES: gl.constexpr):
    """An array of mbarriers for each operand of a ring."""
    return barriers(STAGES), barriers(STAGES), barriers(STAGES), barriers(STAGES)


@gluon.jit
def await_tiles(full, stage, phase):
    for i in gl.static_range(4):
        mbarrier.wait(full[i].index(stage), phase)


@gluon.jit
def fetch_four(descs, tiles, bar, b, h, start):
    """Four [rows, D] tiles that arrive on one mbarrier."""
    mbarrier.expect(bar, 4 * tiles[0].numel * 2)
    for i in gl.static_range(4):
        tma.async_copy_global_to_shared(descs[i], [b, h, start, 0], bar, tiles[i])


@gluon.jit
def fetch_keys(descs, ring, full, stage, b, kv, n0, hi):
    """Start loading the tiles of k, v, uk, uv at n0 into a stage of their rings; nothing from hi on."""
    more = n0 < hi
    for i in gl.static_range(4):
        mbarrier.expect(full[i].index(stage), ring[i].index(stage).numel * 2, pred=more)
    for i in gl.static_range(4):
        tma.async_copy_global_to_shared(descs[i], [b, kv, n0, 0], full[i].index(stage), ring[i].index(stage), pred=more)


@gluon.jit
def fetch_queries(descs, ring, full, stage, b, h, head, m0, queries, query_blocks):
    """Start loading the tiles of q, uq, do at m0, and their packed row scalars; nothing from `queries` on."""
    BM: gl.constexpr = ring[0].shape[1]
    more = m0 < queries
    for i in gl.static_range(3):
        mbarrier.expect(full[i].index(stage), ring[i].index(stage).numel * 2, pred=more)
    mbarrier.expect(full[3].index(stage), 4 * BM * 4, pred=more)
    for i in gl.static_range(3):
        tma.async_copy_global_to_shared(descs[i], [b, h, m0, 0], full[i].index(stage), ring[i].index(stage), pred=more)
    block = head * query_blocks + m0 // BM
    tma.async_copy_global_to_shared(descs[3], [block * 4 * BM], full[3].index(stage), ring[3].index(stage), pred=more)


@gluon.jit
def next_queries(m0, group, lo, queries, BM: gl.constexpr, GROUPS: gl.constexpr):
    """The tile after (m0, group); past the last tile of the last head it stays past the end."""
    m0 += BM
    if GROUPS > 1:
        wrap = (m0 >= queries) & (group < GROUPS - 1)
        m0 = gl.where(wrap, lo, m0)
        group = gl.where(wrap, group + 1, group)
    return m0, group


@gluon.jit
def scalar_offsets(rows, BLOCK: gl.constexpr):
    """Where the scalars of these rows lie: blocks of [4, BLOCK], in the order lse (base 2), alpha, E0, delta."""
    return rows // BLOCK * (4 * BLOCK) + rows % BLOCK


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next slot of a ring; the parity of its mbarriers flips at each turn."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def locate(blocks, heads, SECTION: gl.constexpr):
    """(rank of the block, head) of this program, heaviest blocks first.

    SECTION heads at a time run through all their blocks, so that what they stream stays in the L2 cache.
    """
    pid = gl.program_id(0)
    first = pid // (blocks * SECTION) * SECTION
    width = gl.minimum(heads - first, SECTION)
    local = pid % (blocks * SECTION)
    return local // width, first + local % width


@gluon.jit
def own_queries(
    blocks, all_heads, heads, keys, GROUPS: gl.constexpr, BN: gl.constexpr, SECTION: gl.constexpr, CAUSAL: gl.constexpr
):
    """(head of all, b, h, kv, m0, full_hi, hi): the 64 queries of a program see keys up to hi, unmasked to full_hi."""
    rank, head = locate(blocks, all_heads, SECTION)
    m0 = (blocks - 1 - rank) * 64
    b = head // heads
    h = head % heads
    hi = keys
    full_hi = keys // BN * BN
    if CAUSAL:
        hi = gl.minimum(m0 + 64, keys)
        full_hi = gl.minimum(m0 // BN * BN, full_hi)
    return head, b, h, h // GROUPS, m0, full_hi, hi


@gluon.jit
def own_keys(blocks, all_heads, heads, queries, BM: gl.constexpr, SECTION: gl.constexpr, CAUSAL: gl.constexpr):
    """(head of all, b, kv, n0, lo, full_lo): queries from lo on see the 64 keys of a program, unmasked from full_lo."""
    rank, head = locate(blocks, all_heads, SECTION)
    n0 = rank * 64
    b = head // heads
    kv = head % heads
    lo = 0
    full_lo = 0
    if CAUSAL:
        lo = n0 // BM * BM
        full_lo = gl.minimum(gl.cdiv(n0 + 63, BM), gl.cdiv(queries, BM)) * BM
    return head, b, kv, n0, lo, full_lo


@gluon.jit
def fetch_first_keys(descs, ring, full, b, kv, hi):
    """Fill the ring but for its last stage."""
    for i in gl.static_range(ring[0].shape[0] - 1):
        fetch_keys(descs, ring, full, i, b, kv, i * ring[0].shape[1], hi)


@gluon.jit
def fetch_first_queries(descs, ring, full, b, h, head, lo, queries, query_blocks, GROUPS: gl.constexpr):
    """Fill the ring but for its last stage; the tile and the head of the group that come next."""
    BM: gl.constexpr = ring[0].shape[1]
    ahead = lo
    group = 0
    for i in gl.static_range(ring[0].shape[0] - 1):
        fetch_queries(descs, ring, full, i, b, h + group, head + group, ahead, queries, query_blocks)
        ahead, group = next_queries(ahead, group, lo, queries, BM, GROUPS)
    return ahead, group
