FROM python:3.13-slim AS build
RUN python -m venv /opt/twiceshy
COPY requirements.lock /build/
RUN /opt/twiceshy/bin/pip install --no-cache-dir --require-hashes -r /build/requirements.lock
COPY . /build/
RUN /opt/twiceshy/bin/pip install --no-cache-dir --no-deps /build

FROM python:3.13-slim
LABEL org.opencontainers.image.title="twiceshy" \
      org.opencontainers.image.description="Agents that never do it twice: a journaling HTTP proxy sidecar on Postgres" \
      org.opencontainers.image.licenses="MIT"
RUN useradd --uid 10001 --create-home --home-dir /var/lib/twiceshy twiceshy
COPY --from=build /opt/twiceshy /opt/twiceshy
ENV PATH="/opt/twiceshy/bin:$PATH" \
    PYTHONUNBUFFERED=1 \
    TWICESHY_HOME=/var/lib/twiceshy
USER 10001:10001
WORKDIR /var/lib/twiceshy
VOLUME /var/lib/twiceshy
EXPOSE 7777 7778
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["python", "-c", "import socket; socket.create_connection(('127.0.0.1', 7777), 2).close()"]
ENTRYPOINT ["twiceshy"]
CMD ["up", "--host", "0.0.0.0"]
