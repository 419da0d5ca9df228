# An image of Greenroom: one process tree, not as root, logs on standard output.
#
#     docker build -t greenroom .
#     docker run -p 8000:8000 -v greenroom:/var/lib/greenroom greenroom
#
# Add your code and what it imports in an image of your own; see docs/containers.md.
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
COPY . /src
RUN python -m venv /opt/greenroom \
    && /opt/greenroom/bin/pip install --no-cache-dir '/src[all]'

FROM python:${PYTHON}-slim
COPY --from=build /opt/greenroom /opt/greenroom
# The state dir itself is made at the first start, so that it is private also where the volume is not.
RUN groupadd --gid 10001 greenroom \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /srv/app greenroom \
    && install -d -o 10001 -g 10001 /var/lib/greenroom /srv/app
ENV PATH=/opt/greenroom/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    GREENROOM_STATE_DIR=/var/lib/greenroom/state \
    GREENROOM_HTTP_HOST=0.0.0.0 \
    GREENROOM_LOG_FORMAT=json
USER 10001:10001
WORKDIR /srv/app
VOLUME /var/lib/greenroom
EXPOSE 8000 1900
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:%s/-/healthz' % os.environ.get('GREENROOM_HTTP_PORT', '8000'))"]
ENTRYPOINT ["greenroom"]
CMD ["start", "--block"]
