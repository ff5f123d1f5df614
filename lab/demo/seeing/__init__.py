"""How the demo model that sees was made: drawn pictures, questions about them, a trainer, and an examination."""
