"""Errors of storage clients in one line, with the server's own message and without secrets."""
import http
import re

from sdbench.errors import one_line


def store_error(error: BaseException, label: str) -> OSError:
    """Return an OSError of one line that begins with `label`: FileNotFoundError if the file does not exist."""
    # Decide by the status, if the server answered.
    status, message = server_answer(error)
    if 'NoSuchBucket' in message or 'ContainerNotFound' in message:
        return OSError(f'{label}: there is no such bucket; check its name and S3_ENDPOINT_URL')
    if 'requester pays' in message:
        return OSError(f'{label}: the reader pays for this bucket; name your project in GS_USER_PROJECT ({message})')
    if status in (401, 403):
        return OSError(f'{label}: access is denied; check the name and the credentials, which may lack the permission '
                       f'({message})')
    if status == 404 or isinstance(error, FileNotFoundError):
        return FileNotFoundError(f'{label}: there is no such file ({message})')
    if status is not None:
        return OSError(f'{label} cannot be read or written ({message})')

    # Without an answer, the network or a disk of this machine failed. botocore keeps the cause in `kwargs`.
    text = f'{type(error).__name__} {error} {getattr(error, "kwargs", "")}'
    advice = 'check the address, S3_ENDPOINT_URL and the network'
    if re.search('refused', text, re.IGNORECASE):
        return OSError(f'{label}: the connection is refused; {advice}')
    if re.search('resolve|Name or service|Timeout|Connect|SSL|HTTPClient', text):
        return OSError(f'{label}: no server answers there; {advice}')
    return OSError(f'{label} cannot be read or written ({type(error).__name__}: {message})')


def server_answer(error: BaseException) -> tuple[int | None, str]:
    """Return the HTTP status (None if no server answered) and the server's message, in one line without URLs."""
    text = str(error)
    status = None
    if isinstance(getattr(error, 'response', None), dict):  # boto3
        status = error.response['ResponseMetadata']['HTTPStatusCode']
        details = error.response['Error']
        text = f'{details.get("Code", "")} {details.get("Message", "")}'.removeprefix(f'{status} ')
    else:
        for name in ('status_code', 'code'):  # Azure's client, and Google's
            if isinstance(getattr(error, name, None), int):
                status = int(getattr(error, name))

    message = one_line(Exception(re.sub(r'https?://\S*', '', text)), 300)  # URLs may contain passwords
    if status is not None:
        message = f'{status} {message or http.HTTPStatus(status).phrase}'
    return status, message
