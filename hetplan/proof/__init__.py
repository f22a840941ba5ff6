"""Checks a search's result again, without the search."""
