"""Names in other systems and their equivalents in bridle, as data for the APIs, the command line and
docs/coming-from.md."""
