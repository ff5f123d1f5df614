"""Routes about the state of a server: models, adapters, control vectors, policies, status."""

from bridle.http.admin import adapters, control_vectors, models, policies, status

routers = (status.router, models.router, adapters.router, control_vectors.router, policies.router)
