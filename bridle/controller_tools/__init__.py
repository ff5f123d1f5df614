"""Tools that controllers may call while their outputs wait, and the code that runs the calls, outside of the engine's
steps."""

from bridle.controller_tools.call import Call as Call
from bridle.controller_tools.client import CALL_VARIABLE as CALL_VARIABLE
from bridle.controller_tools.client import OF_REQUESTS as OF_REQUESTS
from bridle.controller_tools.client import ClientTool as ClientTool
from bridle.controller_tools.client import check_client_tools as check_client_tools
from bridle.controller_tools.executor import Tool as Tool
from bridle.controller_tools.executor import ToolExecutor as ToolExecutor
from bridle.controller_tools.functions import FunctionTool as FunctionTool
from bridle.controller_tools.functions import function_tools as function_tools
from bridle.controller_tools.limits import DEFAULT_LIMITS as DEFAULT_LIMITS
from bridle.controller_tools.limits import ToolLimits as ToolLimits
from bridle.controller_tools.session import Desk as Desk
from bridle.controller_tools.session import ToolCallContext as ToolCallContext
from bridle.controller_tools.session import ToolSession as ToolSession
