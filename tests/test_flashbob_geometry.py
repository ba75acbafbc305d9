"""The band of visible keys, against the definition spelled out pair by pair."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashbob.geometry import Geometry

SIZES = st.integers(0, 12)
GEOMETRIES = st.builds(
    Geometry.build,
    st.integers(1, 12),
    st.integers(1, 12),
    is_causal=st.booleans(),
    window_size=st.integers(0, 14),
    q_offset=st.none() | st.integers(-15, 15),
    k_offset=st.integers(-5, 5),
)


def definition(queries: int, keys: int, causal: bool, window: int, q_offset: int | None, k_offset: int) -> torch.Tensor:
    """True where query i sees key j, from the words of `sdpa_bob`."""
    if q_offset is None:
        q_offset = k_offset + max(0, keys - queries)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    for i in range(queries):
        for j in range(keys):
            distance = (q_offset + i) - (k_offset + j)
            if causal and distance < 0:
                seen[i, j] = False
            if window and not 0 <= distance < window:
                seen[i, j] = False
    return seen


def visible(geometry: Geometry, bounds: torch.Tensor | None = None) -> torch.Tensor:
    """The whole mask in one tile, [queries, keys], or [B, queries, keys] with bounds."""
    hidden = geometry.hidden(0, geometry.queries, 0, geometry.keys, bounds, torch.device("cpu"))
    if hidden is None:
        return torch.ones(geometry.queries, geometry.keys, dtype=torch.bool)
    return ~hidden if hidden.ndim == 2 else ~hidden[:, 0, 0]


@settings(deadline=None, max_examples=300)
@given(
    queries=st.integers(1, 9),
    keys=st.integers(1, 9),
    causal=st.booleans(),
    window=st.integers(0, 10),
    q_offset=st.none() | st.integers(-12, 12),
    k_offset=st.integers(-4, 4),
)
@example(queries=1, keys=1, causal=True, window=1, q_offset=None, k_offset=0)
@example(queries=5, keys=3, causal=True, window=0, q_offset=None, k_offset=0)
@example(queries=3, keys=5, causal=False, window=2, q_offset=None, k_offset=3)
def test_the_mask_is_its_definition(
    queries: int, keys: int, causal: bool, window: int, q_offset: int | None, k_offset: int
) -> None:
    geometry = Geometry.build(queries, keys, is_causal=causal, window_size=window, q_offset=q_offset, k_offset=k_offset)
    seen = definition(queries, keys, causal, window, q_offset, k_offset)
    assert torch.equal(visible(geometry), seen)
    # Bounds that never bind are dropped, so equal masks are recognized as equal: full masks and the square causal one.
    assert geometry.is_full == bool(seen.all())
    if geometry.is_square_causal:
        assert torch.equal(seen, torch.ones(queries, keys, dtype=torch.bool).tril())


def hull(seen: torch.Tensor) -> tuple[int, int] | None:
    """Smallest half-open range that holds the true entries, or None without any."""
    where = seen.nonzero()
    return (int(where.min()), int(where.max()) + 1) if len(where) else None


def as_hull(bounds: tuple[int, int]) -> tuple[int, int] | None:
    return bounds if bounds[0] < bounds[1] else None


@settings(deadline=None, max_examples=300)
@given(GEOMETRIES, st.data())
def test_ranges_are_the_smallest_that_hold_what_is_seen(geometry: Geometry, data: st.DataObject) -> None:
    seen = visible(geometry)
    m0 = data.draw(st.integers(0, geometry.queries - 1))
    m1 = data.draw(st.integers(m0 + 1, geometry.queries))
    n0 = data.draw(st.integers(0, geometry.keys - 1))
    n1 = data.draw(st.integers(n0 + 1, geometry.keys))
    assert as_hull(geometry.key_range(m0, m1)) == hull(seen[m0:m1].any(0))
    assert as_hull(geometry.query_range(n0, n1)) == hull(seen[:, n0:n1].any(1))
    for low, high, size in (
        (*geometry.key_range(m0, m1), geometry.keys),
        (*geometry.query_range(n0, n1), geometry.queries),
    ):
        assert 0 <= low <= size
        assert 0 <= high <= size


@settings(deadline=None, max_examples=200)
@given(GEOMETRIES, st.data())
def test_a_tile_is_its_part_of_the_mask(geometry: Geometry, data: st.DataObject) -> None:
    seen = visible(geometry)
    m0 = data.draw(st.integers(0, geometry.queries - 1))
    m1 = data.draw(st.integers(m0 + 1, geometry.queries))
    n0 = data.draw(st.integers(0, geometry.keys - 1))
    n1 = data.draw(st.integers(n0 + 1, geometry.keys))
    hidden = geometry.hidden(m0, m1, n0, n1, None, torch.device("cpu"))
    if hidden is None:
        assert seen[m0:m1, n0:n1].all()
    else:
        assert torch.equal(~hidden, seen[m0:m1, n0:n1])
        assert hidden.any(), "a tile without hidden pairs needs no mask"


@settings(deadline=None, max_examples=100)
@given(GEOMETRIES, st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=3))
def test_padding_hides_keys_of_its_own_sequence(geometry: Geometry, ranges: list[tuple[int, int]]) -> None:
    keys = torch.arange(geometry.keys)
    found = visible(geometry, torch.tensor(ranges))
    for sequence, (start, stop) in zip(found, ranges, strict=True):
        assert torch.equal(sequence, visible(geometry) & (keys >= start) & (keys < stop))


def test_the_default_alignment_ends_queries_with_keys() -> None:
    assert Geometry.build(3, 8, is_causal=True, window_size=0, q_offset=None, k_offset=2).shift == 5
    assert Geometry.build(8, 3, is_causal=True, window_size=0, q_offset=None, k_offset=2).shift == 0
