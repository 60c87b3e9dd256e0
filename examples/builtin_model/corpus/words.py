"""Word pools shared by the skills."""

from examples.builtin_model.corpus.text_pools import pools

_POOLS: dict[str, list[str]] = pools("words")

NAMES = _POOLS["names"]
SURNAMES = _POOLS["surnames"]
CITIES = _POOLS["cities"]
ANIMALS = _POOLS["animals"]
HEROES = _POOLS["heroes"]
PLACES = _POOLS["places"]
COLOURS = _POOLS["colours"]
FRUITS = _POOLS["fruits"]
VEGETABLES = _POOLS["vegetables"]
TREES = _POOLS["trees"]
INSTRUMENTS = _POOLS["instruments"]
SPORTS = _POOLS["sports"]
JOBS = _POOLS["jobs"]
FOODS = _POOLS["foods"]
TOPICS = _POOLS["topics"]
PEOPLE = _POOLS["people"]
ACTIVITIES = _POOLS["activities"]
