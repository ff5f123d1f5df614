"""Routes that tell what a server holds and does: models, adapters, status."""

from bridle.http.admin import adapters, models, status

routers = (status.router, models.router, adapters.router)
