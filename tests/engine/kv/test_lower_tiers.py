from engine.kv.lower_tiers import LowerTier

NAME = b"a" * 16


def test_an_unreadable_copy_is_found_by_nobody_though_others_still_read_it() -> None:
    """Requests whose loads overlap would else read it in turn for ever."""
    tier = LowerTier.of_size(1)
    tier.learn([NAME])
    before, slot = (tier.version, tier.num_drops), tier.take(NAME)
    assert tier.take(NAME) == slot
    tier.drop(NAME, is_readable=False)
    assert NAME not in tier
    assert tier.version > before[0]
    assert tier.num_drops > before[1]  # so that prefixes are searched again
    assert not tier.make_room(1)  # the other load reads the slot
    tier.check()
    tier.drop(NAME)
    assert tier.make_room(1)
    assert not tier.has_or_writes(NAME)
    tier.check()


def test_an_unreadable_copy_is_dropped_when_no_step_will_return() -> None:
    tier = LowerTier.of_size(1)
    tier.learn([NAME])
    tier.take(NAME)
    tier.take(NAME)
    tier.drop(NAME, is_readable=False)
    tier.abandon()
    tier.check()
    tier.learn([NAME])
    assert NAME in tier
