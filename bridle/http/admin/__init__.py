"""Routes about the state of a server: models, adapters, policies, status."""

from bridle.http.admin import adapters, models, policies, status

routers = (status.router, models.router, adapters.router, policies.router)
