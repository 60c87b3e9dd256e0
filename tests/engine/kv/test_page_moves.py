from array import array

from engine.kv.layer_groups import PagePairs
from engine.kv.ledger import KVLedger
from engine.kv.page_moves import PageMoves
from engine.kv_shape import KVShape
from engine.step import BlockMove, Direction, PageKind


def test_moves_that_the_step_waits_for_come_first() -> None:
    """Out before in, as they were ordered: what comes in may lie where something goes out."""
    moves = PageMoves(KVLedger(KVShape(8, 4, 8)))

    def swap(direction: Direction, block: int, *, is_awaited: bool) -> BlockMove:
        pages = array("i", [block])
        pairs = [PagePairs(PageKind.BLOCK, pages, pages)]
        return moves.swap(direction, pairs, is_awaited=is_awaited)

    ahead = swap(Direction.OUT, 0, is_awaited=False)
    out = swap(Direction.OUT, 1, is_awaited=True)
    into = swap(Direction.IN, 1, is_awaited=True)
    assert moves.collect().moves == (out, into, ahead)
