"""AICI's REST API: routes that upload, tag and run controllers."""
