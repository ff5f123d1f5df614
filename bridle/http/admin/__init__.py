"""Routes that tell what a server holds and does: models, adapters, policies, status."""

from bridle.http.admin import adapters, models, policies, status

routers = (status.router, models.router, adapters.router, policies.router)
