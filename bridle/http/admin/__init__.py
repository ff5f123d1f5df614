"""Routes for the management of a server: models, adapters, control vectors, pauses, policies, status."""

from bridle.http.admin import adapters, control_vectors, models, pause, policies, status

routers = (status.router, models.router, adapters.router, control_vectors.router, pause.router, policies.router)
