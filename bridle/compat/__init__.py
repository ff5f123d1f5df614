"""Tables of names in other systems and their equivalents in bridle, for the APIs, the command line and
docs/coming-from.md."""
