"""AICI's REST API: controllers are uploaded, tagged and run."""
