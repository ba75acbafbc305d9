"""The traffic model: closed forms against a count of every tile that the two loops touch."""

from __future__ import annotations

import pytest

from flashbob.traffic import Traffic, column_pass, published, row_pass


def counted(n: int, d: int, causal: bool, block: int, tile: int, *, columns: bool) -> int:
    """Entries that one head's pass streams, by walking over its tiles; row scalars count as one entry each."""
    per_row = 3 * d + 4 if columns else 4 * d
    entries = 0
    for owned in range(0, n, block):
        for first in range(0, n, tile):
            queries, keys = (first, owned) if columns else (owned, first)
            last_query = min(n, queries + (tile if columns else block)) - 1
            if not causal or keys <= last_query:
                entries += per_row * (min(n, first + tile) - first)
    return entries


SIZES = {"heads": 1, "kv_heads": 1, "batch": 1}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("n", "block", "tile"), [(64, 16, 16), (96, 32, 16), (96, 16, 32), (101, 16, 8), (7, 16, 16)])
@pytest.mark.parametrize("columns", [False, True], ids=["row-pass", "column-pass"])
def test_streamed_entries_are_those_of_the_tiles(n: int, block: int, tile: int, causal: bool, columns: bool) -> None:
    # Four bytes an entry: tensors and row scalars alike, so that bytes are entries times four.
    model = (column_pass if columns else row_pass)(n, 8, causal=causal, block=block, tile=tile, itemsize=4, **SIZES)
    assert model.streamed == 4 * counted(n, 8, causal, block, tile, columns=columns)


@pytest.mark.parametrize(("n", "d", "row_block", "column_block"), [(128, 64, 32, 16), (1024, 128, 64, 128)])
def test_ours_is_the_published_closed_form_and_one_more_tensor_read(
    n: int, d: int, row_block: int, column_block: int
) -> None:
    row = row_pass(n, d, causal=False, block=row_block, tile=16, itemsize=4, **SIZES)
    column = column_pass(n, d, causal=False, block=column_block, tile=16, itemsize=4, **SIZES)
    assert (row + column).total == 4 * (published(n, d, row_block, column_block) + n * d)


def test_a_causal_mask_halves_what_is_streamed_and_nothing_else() -> None:
    def both(causal: bool) -> Traffic:
        options = {"causal": causal, "block": 64, "tile": 32, "itemsize": 2, **SIZES}
        return row_pass(8192, 64, **options) + column_pass(8192, 64, **options)

    assert both(True).stationary == both(False).stationary
    assert both(True).streamed / both(False).streamed == pytest.approx(0.5, rel=0.01)


def test_grouped_heads_share_what_a_key_block_owns() -> None:
    def column(kv_heads: int) -> Traffic:
        return column_pass(256, 64, heads=8, kv_heads=kv_heads, batch=2, causal=True, block=64, tile=64, itemsize=2)

    assert column(2).stationary * 4 == column(8).stationary
    assert column(2).streamed == column(8).streamed


def test_compulsory_traffic_is_a_lower_bound() -> None:
    for columns in (row_pass, column_pass):
        one = columns(256, 32, causal=False, block=256, tile=64, itemsize=2, **SIZES)
        many = columns(256, 32, causal=False, block=32, tile=64, itemsize=2, **SIZES)
        assert one.total == one.compulsory == many.compulsory < many.total
