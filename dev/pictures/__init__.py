"""Pictures for README and pages, each drawn by a script from something that ran."""
