/* What a function mode does about the calls that need no thought: torch asks a mode by a C string, and gets this instead of
 * its method `__torch_function__`. Python code and torch.compile ask by a Python string, and get the method.
 *
 * The mode's `quick` is (plans, plan of what is no operation, session, handling, is_compiling, is_tracing, recording). Whatever is not
 * plain goes to the method, which does the same. There is no frame of ours above the call, so warnings name the program's line.
 */
static PyObject *s_torch_function, *s_quick, *s_plain, *s_state, *s_recording, *s_before, *s_finish, *s_raised;

enum { PLANS, NOT_AN_OP, SESSION, HANDLING, IS_COMPILING, IS_TRACING, RECORD, QUICK_WIDTH };

/* The program's error is being raised: have it recorded. What is raised meanwhile takes its place, with it as context. */
static void record_raised(PyObject *handling, PyObject *call) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL) PyException_SetTraceback(error, trace);
    PyObject *done = PyObject_CallMethodObjArgs(handling, s_raised, call, error, NULL);
    if (done != NULL) {
        Py_DECREF(done);
        PyErr_Restore(type, error, trace);
        return;
    }
    PyObject *new_type, *new_error, *new_trace;
    PyErr_Fetch(&new_type, &new_error, &new_trace);
    PyErr_NormalizeException(&new_type, &new_error, &new_trace);
    PyException_SetContext(new_error, error);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    PyErr_Restore(new_type, new_error, new_trace);
}

/* Describing.run, for a plan that is plain. */
static PyObject *run_described(PyObject *handling, PyObject *func, PyObject *plan, PyObject *state, PyObject *args, PyObject *kwargs) {
    PyObject *keywords = kwargs, *result = NULL, *done;
    if (keywords == NULL) keywords = PyDict_New();
    else Py_INCREF(keywords);
    if (keywords == NULL) return NULL;
    PyObject *call = PyObject_CallMethodObjArgs(handling, s_before, state, plan, args, keywords, NULL);
    if (call != NULL) {
        result = PyObject_Call(func, args, kwargs);
        if (result == NULL && call != Py_None) record_raised(handling, call);
        if (result != NULL && call != Py_None) {
            done = PyObject_CallMethodObjArgs(handling, s_finish, state, func, plan, call, result, args, keywords, NULL);
            if (done == NULL) {
                Py_DECREF(result);
                result = NULL;
            }
            Py_XDECREF(done);
        }
    }
    Py_XDECREF(call);
    Py_DECREF(keywords);
    return result;
}

/* Leave the handler because of an exception: the thread is not busy with us any more. */
static void clear_busy(PyObject *state) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    if (PyObject_SetAttr(state, s_busy, Py_False)) PyErr_Clear();
    PyErr_Restore(type, error, trace);
}

/* The plan of a function (borrowed); NULL without an error when there is none, or the function cannot be hashed. */
static PyObject *known_plan(PyObject *quick, PyObject *func) {
    PyObject *plan = PyDict_GetItemWithError(PyTuple_GetItem(quick, PLANS), func);
    if (plan == NULL && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError)) PyErr_Clear();
    return plan;
}

/* Whether this thread is not busy with us, and does not trace: 1 or 0, -1 on error. */
static int is_free(PyObject *quick, PyObject *state) {
    const int busy = flag_of(state, s_busy);
    if (busy) return busy < 0 ? -1 : 0;
    const int traces = is_true(PyObject_CallFunctionObjArgs(PyTuple_GetItem(quick, IS_TRACING), NULL));
    return traces < 0 ? -1 : !traces;
}

/* 1: the call was handled, `result` is what came of it, NULL with an error. 0: it is for the method. -1: an error, which may be
 * one that a signal's handler has raised into code of ours: none is swallowed. */
static int handle_quickly(PyObject *quick, PyObject *func, PyObject *args, PyObject *kwargs, PyObject **result) {
    PyObject *plan = known_plan(quick, func);
    if (plan == NULL) return PyErr_Occurred() ? -1 : 0;
    Py_INCREF(plan); /* the call may teach us another one */
    int handled = is_true(PyObject_CallFunctionObjArgs(PyTuple_GetItem(quick, IS_COMPILING), NULL));
    if (handled == 0 && plan == PyTuple_GetItem(quick, NOT_AN_OP)) {
        *result = PyObject_Call(func, args, kwargs);
        handled = 1;
    } else if (handled == 0) {
        PyObject *session = PyTuple_GetItem(quick, SESSION), *handling = PyTuple_GetItem(quick, HANDLING), *state = NULL;
        if (handling != Py_None) handled = flag_of(plan, s_plain);
        if (handled == 1) handled = flag_of(session, s_recording);
        if (handled == 1) handled = (state = PyObject_GetAttr(session, s_state)) == NULL ? -1 : is_free(quick, state);
        PyObject *recording = PyTuple_GetItem(quick, RECORD);
        const int recorded = handled != 1 || recording == Py_None ? 0 : record_call(recording, func, plan, state, args, kwargs, result);
        if (recorded < 0) handled = -1;
        if (handled == 1 && !recorded) {
            *result = run_described(handling, func, plan, state, args, kwargs);
            if (*result == NULL) clear_busy(state);
        }
        Py_XDECREF(state);
    } else if (handled == 1) {
        handled = 0; /* what is compiled is the method's */
    }
    Py_DECREF(plan);
    return handled;
}

/* __torch_function__(func, types, args, kwargs) as torch's C++ calls it */
static PyObject *handle_call(PyObject *mode, PyObject *const *given, Py_ssize_t n) {
    PyObject *result = NULL, *kwargs = n > 3 && given[3] != Py_None ? given[3] : NULL;
    if ((n == 3 || n == 4) && PyTuple_Check(given[2]) && (kwargs == NULL || PyDict_Check(kwargs))) {
        PyObject *quick = PyObject_GetAttr(mode, s_quick);
        if (quick == NULL) return NULL;
        const int usable = PyTuple_Check(quick) && PyTuple_Size(quick) == QUICK_WIDTH && PyDict_Check(PyTuple_GetItem(quick, PLANS));
        const int handled = usable ? handle_quickly(quick, given[0], given[2], kwargs, &result) : 0;
        Py_DECREF(quick);
        if (handled) return result;
    }
    PyObject *method = PyObject_GetAttr(mode, s_torch_function), *all = method == NULL ? NULL : PyTuple_New(n);
    for (Py_ssize_t i = 0; all != NULL && i < n; i++) {
        Py_INCREF(given[i]);
        PyTuple_SetItem(all, i, given[i]);
    }
    if (all != NULL) result = PyObject_Call(method, all, NULL);
    Py_XDECREF(all);
    Py_XDECREF(method);
    return result;
}

static PyMethodDef handler = {"__torch_function__", (PyCFunction)(void (*)(void))handle_call, METH_FASTCALL, NULL};

static PyObject *mode_getattr(PyObject *mode, char *name) {
    if (!strcmp(name, handler.ml_name)) return PyCFunction_NewEx(&handler, mode, NULL);
    PyObject *text = PyUnicode_InternFromString(name), *found = text == NULL ? NULL : PyObject_GenericGetAttr(mode, text);
    Py_XDECREF(text);
    return found;
}

/* mode_type(class) -> a subclass whose instances answer torch's C++ with `handle_call` */
static PyObject *mode_type(PyObject *module, PyObject *base) {
    (void)module;
    if (!PyType_Check(base)) return PyErr_Format(PyExc_TypeError, "mode_type(class)"), NULL;
    PyObject *number = PyObject_GetAttrString(base, "__basicsize__"), *bases = number == NULL ? NULL : PyTuple_Pack(1, base), *made = NULL;
    const long size = number == NULL ? -1 : PyLong_AsLong(number);
    if (bases != NULL && size > 0) {
        PyType_Slot slots[] = {{Py_tp_getattr, (void *)(uintptr_t)mode_getattr}, {Py_tp_getattro, (void *)(uintptr_t)PyObject_GenericGetAttr}, {0, NULL}};
        PyType_Spec spec = {"tensorprobe._fast.Mode", (int)size, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
        made = PyType_FromSpecWithBases(&spec, bases);
    }
    Py_XDECREF(bases);
    Py_XDECREF(number);
    return made;
}
