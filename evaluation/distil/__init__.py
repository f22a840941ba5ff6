"""Unit data of other people made into populations that hetplan ships."""
