"""What went wrong with an upstream, in words for whoever reads them: libraries have theirs for programmers."""

import os
import socket
import ssl

import aiohttp

from proxy.refusals import http2_only
from runtime.names import shortened


def unreached(error: Exception, host: str, port: int) -> str:
    """Why there is no connection to *host*."""
    cause: BaseException = getattr(error, "os_error", None) or error
    place = f"{f'[{host}]' if ':' in host else host}:{port}"
    words = " ".join(str(cause).split()) or type(cause).__name__
    if "no application protocol" in words.replace("_", " ").lower():
        return http2_only(host, port, host)
    match cause:
        case ssl.SSLCertVerificationError():
            return f"{place}: its certificate is not verified: {cause.verify_message}"
        case aiohttp.ClientConnectorCertificateError():
            return f"{place}: its certificate is not verified: {cause.certificate_error}"
        case ssl.SSLError():
            return f"{place}: no TLS: {(cause.reason or words).replace('_', ' ').lower()}"
        case socket.gaierror():
            return f"{host}: this name cannot be looked up: {cause.strerror}"
        case OSError() if isinstance(error, aiohttp.ClientConnectorDNSError):
            return f"{host}: this name cannot be looked up: {shortened(str(cause.args[-1]))}"
        case OSError() if cause.errno is not None and cause.errno > 0:
            return f"{place}: {os.strerror(cause.errno)}"
        case _:
            return f"{place}: no connection: {shortened(words)}"


def broken(error: Exception) -> str:
    """Why there is no answer, or no end of it, on a connection that stood."""
    match error:
        case aiohttp.ServerDisconnectedError():
            return "it closed the connection"
        case aiohttp.ClientResponseError():
            return f"what it sends is no HTTP: {shortened(' '.join(error.message.split()))}"
        case aiohttp.ClientPayloadError():
            return "the answer's body is not complete"
        case OSError() if error.errno is not None and error.errno > 0:
            return os.strerror(error.errno)
        case _:
            return shortened(" ".join(str(error).split()) or type(error).__name__)
