"""A shop in Django: a payment is a row of the ORM and a confirmation over JMS, both or neither. See docs/guides/django.md.

    PGHOST=127.0.0.1 PGUSER=shop python examples/django_shop.py 8000 'failover:(amqp://127.0.0.1:5672)' shop shop.xalog
    curl -d order=4711 -d amount=90 http://127.0.0.1:8000/payments

The answer is 201, or 409 if the order was paid before. After 503, or none, ask again.
"""

import sys
from pathlib import Path

from django.conf import settings
from django.core.servers.basehttp import run
from django.core.wsgi import get_wsgi_application
from django.db import IntegrityError, connection, models
from django.http import HttpRequest, HttpResponse
from django.urls import path

from bascule import BasculeError, FileLog, JmsResource, Queue, TransactionManager
from bascule.xa.django import django_resource

PORT, URL, DATABASE, LOG = sys.argv[1:]
DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": DATABASE}}
settings.configure(DATABASES=DATABASES, ROOT_URLCONF=__name__, ALLOWED_HOSTS=["127.0.0.1"])
application = get_wsgi_application()
broker, shop = JmsResource("broker", URL), django_resource("shop-db")
manager = TransactionManager("django-shop", FileLog(Path(LOG)), [broker, shop])


class Payment(models.Model):
    order = models.BigIntegerField(primary_key=True)
    amount = models.BigIntegerField()

    class Meta:
        app_label = "shop"


@manager.transactional(attempts=3)
def pay(order: int, amount: int) -> None:
    Payment.objects.create(order=order, amount=amount)
    manager.enlist(broker).send(Queue("django.confirmed"), f"{order}: {amount}")


def payments(request: HttpRequest) -> HttpResponse:
    try:
        pay(int(request.POST["order"]), int(request.POST["amount"]))
    except IntegrityError:
        return HttpResponse("paid before\n", status=409)
    except BasculeError as error:  # rolled back, or in doubt until recovery has settled it
        return HttpResponse(f"{error}\n", status=503)
    return HttpResponse("paid\n", status=201)


urlpatterns = [path("payments", payments)]
connection.cursor().execute('CREATE TABLE IF NOT EXISTS shop_payment ("order" bigint PRIMARY KEY, amount bigint)')  # in a project: migrate
with manager:
    run("127.0.0.1", int(PORT), application, threading=True)
